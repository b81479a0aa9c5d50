/* moves FOLDER [REMOVED]: changes its folder before it first calls the driver; then a file is removed by its name there. */
#include "program.h"

#include <unistd.h>

int main(int count, char **arguments)
{
    REQUIRE(count > 1 && chdir(arguments[1]) == 0);
    start_on(0);
    if (count > 2)
        REQUIRE(unlink(arguments[2]) == 0);
    return 0;
}
