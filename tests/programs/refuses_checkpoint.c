/*
 * refuses_checkpoint: a driver that stops other processes and then refuses to take their memory away (999, UNKNOWN). With -DOLD one that is older than
 * these calls.
 */
int cuInit(unsigned flags)
{
    (void)flags;
    return 100;
}

#ifndef OLD
int cuCheckpointProcessGetState(int process, int *state)
{
    (void)process;
    *state = 0;
    return 0;
}

int cuCheckpointProcessLock(int process, void *arguments)
{
    (void)process, (void)arguments;
    return 0;
}

int cuCheckpointProcessCheckpoint(int process, void *arguments)
{
    (void)process, (void)arguments;
    return 999;
}

int cuCheckpointProcessRestore(int process, void *arguments)
{
    (void)process, (void)arguments;
    return 999;
}

int cuCheckpointProcessUnlock(int process, void *arguments)
{
    (void)process, (void)arguments;
    return 0;
}
#endif
