/*
 * bad_exec: asks for programs with a path, words and an environment that are not there, and prints what it is told. Nothing
 * is started, so the process is still there at the end.
 */
#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

extern char **environ;

#define TRY(call)                                                                                                  \
    do {                                                                                                           \
        errno = 0;                                                                                                 \
        int answer = (call);                                                                                       \
        printf("%s: %d, %s\n", #call, answer, strerror(errno));                                                    \
        fflush(stdout);                                                                                            \
    } while (0)

int main(void)
{
    /* Volatile: the compiler would see that nothing is there, too. */
    char *volatile nowhere = (char *)8, **volatile none = (char **)8;
    char *words[] = {"true", NULL}, *good[] = {"A=1", NULL}, *bad[] = {"A=1", nowhere, NULL};
    /* A string that goes on into a page that is not there. */
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(pages != MAP_FAILED && munmap(pages + 4096, 4096) == 0);
    char *cut = memset(pages + 4092, 'x', 4);
    int true_file = open("/bin/true", O_RDONLY);
    REQUIRE(true_file >= 0);
    TRY(execv(nowhere, words));
    TRY(execv("/bin/true", none));
    TRY(execv(cut, words));
    TRY(execve(nowhere, words, good));
    TRY(execve("/bin/true", none, good));
    TRY(execve("/bin/true", words, none));
    TRY(execve("/bin/true", words, bad));
    TRY(execve("/no/such", words, bad));
    TRY(execveat(AT_FDCWD, nowhere, words, good, 0));
    TRY(execveat(AT_FDCWD, "/bin/true", words, bad, 0));
    TRY(fexecve(true_file, words, none));
    TRY(execl(nowhere, "true", (char *)NULL));
    TRY(execle("/bin/true", "true", (char *)NULL, none));
    TRY(execle("/bin/true", "true", (char *)NULL, bad));
    char *list[] = {"A=1", cut, NULL};
    TRY(execve("/bin/true", words, list));
    environ = bad;
    TRY(execv("/bin/true", words));
    return 0;
}
