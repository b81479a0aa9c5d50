/* A plugin for Slurm: `srun --gpupool …` and `sbatch --gpupool …` run the tasks of a job with the pool.
 *
 *   cc -shared -fPIC -o /usr/lib64/slurm/spank_gpupool.so spank_gpupool.c
 *   echo 'optional spank_gpupool.so library=/usr/lib/gpupool/libgpupool.so' >> /etc/slurm/plugstack.conf
 *
 * The library is preloaded into the tasks alone: not into Slurm's own daemons, as by a variable of slurmd's, and not into the shell
 * that submits, as by `export LD_PRELOAD`, where it would come before every command. Without the plugin the same is had by
 * `srun gpupool run -- python train.py`. The ranks of a job find each other by Slurm's own variables. */
#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(gpupool, 1);

static int wanted;

static int chosen(int value, const char *argument, int remote) {
    (void)value, (void)argument, (void)remote;
    wanted = 1;
    return ESPANK_SUCCESS;
}

static struct spank_option option = {
    "gpupool", NULL, "Serve the tasks' CUDA memory from all GPUs of the job and the host", 0, 0, chosen,
};

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    return spank_option_register(spank, &option);
}

/* In each task, as its user, right before its program starts. */
int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    const char *library = "/usr/lib/gpupool/libgpupool.so";
    char before[4096] = "", list[8192];
    if (!wanted) return ESPANK_SUCCESS;
    for (int i = 0; i < count; i++)
        if (strncmp(arguments[i], "library=", 8) == 0) library = arguments[i] + 8;
    if (access(library, R_OK) != 0) {
        slurm_error("gpupool: %s cannot be read on this node; install gpupool here, or name it in plugstack.conf", library);
        return ESPANK_ERROR;
    }
    spank_getenv(spank, "LD_PRELOAD", before, sizeof before);
    snprintf(list, sizeof list, "%s%s%s", library, *before ? ":" : "", before);
    return spank_setenv(spank, "LD_PRELOAD", list, 1);
}
