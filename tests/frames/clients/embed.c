/* An embedding program: no frames before Python is up, some while it runs, none after, twice over.
 * With WRONG_LINE it exports a PyFrame_GetLineNumber that lies, so that the comparison must fail. */
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static ssize_t (*count)(void);
static ssize_t (*state)(char *, size_t);

#ifdef WRONG_LINE
int PyFrame_GetLineNumber(PyFrameObject *frame) { return frame ? 12345 : 0; }
#endif

static void say(const char *when)
{
    char text[512];
    ssize_t frames = count();
    state(text, sizeof text);
    printf("%s: %zd; %s\n", when, frames, text);
}

static PyObject *read_frames(PyObject *self, PyObject *unused)
{
    static int asked;
    if (!asked++) {
        /* The first capture with the GIL, and with an exception under way, which must stay as it is. */
        PyErr_SetString(PyExc_KeyError, "ours");
        say("with an exception");
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            abort();
        PyErr_Clear();
    }
    return PyLong_FromSsize_t(count());
}

static pthread_barrier_t lingers, finalised, has_said;

/* Stays in C code called from Python until the interpreter is gone, and asks for frames then. */
static PyObject *linger(PyObject *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    say("lingering");
    pthread_barrier_wait(&lingers);
    pthread_barrier_wait(&finalised);
    say("left behind");
    pthread_barrier_wait(&has_said);
    /* There is no Python to return to; the process ends without this thread. */
    for (;;)
        pause();
    Py_END_ALLOW_THREADS
    return NULL;
}

static PyMethodDef read_method = {"read_frames", read_frames, METH_NOARGS, NULL};
static PyMethodDef linger_method = {"linger", linger, METH_NOARGS, NULL};

static void offer(PyMethodDef *method)
{
    PyObject *function = PyCFunction_New(method, NULL);
    PyObject_SetAttrString(PyImport_AddModule("__main__"), method->ml_name, function);
    Py_DecRef(function);
}

static void run(const char *when)
{
    offer(&read_method);
    printf("%s: ", when);
    PyRun_SimpleString("def f(n): return read_frames() if n == 0 else f(n - 1)\nprint(f(3), flush=True)\n");
}

static void *native(void *unused)
{
    say("native thread");
    return NULL;
}

static void *attached(void *unused)
{
    PyGILState_STATE held = PyGILState_Ensure();
    say("attached thread, no code");
    run("attached thread");
    PyGILState_Release(held);
    say("released thread");
    return NULL;
}

static void *left_behind(void *unused)
{
    PyGILState_Ensure();
    offer(&linger_method);
    PyRun_SimpleString("def f(n): return linger() if n == 0 else f(n - 1)\nf(3)\n");
    return NULL;
}

static void on_thread(void *(*body)(void *))
{
    pthread_t thread;
    pthread_create(&thread, NULL, body, NULL);
    pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
    /* Python writes to the same file. */
    setvbuf(stdout, NULL, _IONBF, 0);
    void *probe = dlopen(argv[1], RTLD_NOW);
    if (!probe) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    count = (ssize_t(*)(void))dlsym(probe, "frames_count");
    state = (ssize_t(*)(char *, size_t))dlsym(probe, "frames_state");
    pthread_barrier_init(&lingers, NULL, 2);
    pthread_barrier_init(&finalised, NULL, 2);
    pthread_barrier_init(&has_said, NULL, 2);
    say("before");
    for (int round = 0; round < 2; round++) {
        Py_Initialize();
        say("initialised");
        run("running");
        on_thread(native);
        Py_BEGIN_ALLOW_THREADS
        on_thread(attached);
        Py_END_ALLOW_THREADS
        run("again");
        if (round == 1) {
            pthread_t thread;
            Py_BEGIN_ALLOW_THREADS
            pthread_create(&thread, NULL, left_behind, NULL);
            pthread_barrier_wait(&lingers);
            Py_END_ALLOW_THREADS
        }
        if (Py_FinalizeEx() != 0)
            return 3;
        say("finalised");
    }
    pthread_barrier_wait(&finalised);
    pthread_barrier_wait(&has_said);
    on_thread(native);
    return 0;
}
