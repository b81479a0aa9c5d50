/* A plugin for Slurm: `srun --gpupool …` and `sbatch --gpupool …` run the tasks of a job with the pool.
 *
 *   cc -shared -fPIC -o /usr/local/lib/spank_gpupool.so spank_gpupool.c
 *   echo 'optional /usr/local/lib/spank_gpupool.so library=/usr/lib/gpupool/libgpupool.so' >> /etc/slurm/plugstack.conf
 *
 * on the nodes and where jobs are submitted, and again after Slurm was updated, which takes no plugin of another version. A name
 * without a path would be looked for in Slurm's own folder alone, which is another one in each distribution. After it `srun --help`
 * lists the option.
 *
 * The library is preloaded into the tasks alone, of which a job's script is one: not into Slurm's own daemons, as by a variable of
 * slurmd's, and not into the shell that submits or that salloc starts, as by `export LD_PRELOAD`, where it would come before every
 * command. Settings are variables of the shell that submits (`GPUPOOL_SUMMARY=on srun --gpupool …`), which Slurm hands on unless
 * `--export=NONE` forbids it. A node without the library says so, and the task runs on without the pool. Without the plugin the same is
 * had by `srun gpupool run -- python train.py`. The ranks of a job find each other by Slurm's own variables. Tried with Slurm 22.05.8
 * and 24.11.5, on one node with simulated GPUs. */
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

/* Whether LD_PRELOAD has the library already. The loader takes colons and spaces between names. */
static int in_list(const char *list, const char *library) {
    size_t length = strlen(library);
    for (; *list; list += strcspn(list, ": "), list += strspn(list, ": "))
        if (strncmp(list, library, length) == 0 && strchr(": ", list[length])) return 1;
    return 0;
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
    spank_err_t found = spank_getenv(spank, "LD_PRELOAD", before, sizeof before);
    if (found != ESPANK_SUCCESS && found != ESPANK_ENV_NOEXIST) {
        slurm_error("gpupool: LD_PRELOAD cannot be read: %s; nothing was changed", spank_strerror(found));
        return ESPANK_ERROR;
    }
    /* A step of a job's script has it from there. */
    if (in_list(before, library)) return ESPANK_SUCCESS;
    snprintf(list, sizeof list, "%s%s%s", library, *before ? ":" : "", before);
    return spank_setenv(spank, "LD_PRELOAD", list, 1);
}
