/* control_state: what part gpupool plays after one allocation, and why. */
#include "control.h"

int main(void)
{
    CUdeviceptr block;
    Control c = find_control(RTLD_DEFAULT);
    start_on(0);
    CHECK(cuMemAlloc_v2(&block, 32 * MIB));
    printf("%s, mode %s%s%s\n", state_name(c.state()), c.mode(), *c.why() ? ", " : "", c.why());
    return 0;
}
