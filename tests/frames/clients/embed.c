/* An embedding program: no frames before Python is up, some while it runs, none after, twice over.
 * With WRONG_LINE it exports a PyFrame_GetLineNumber that lies, so that the comparison must fail. */
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>

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

static PyMethodDef read_method = {"read_frames", read_frames, METH_NOARGS, NULL};

static void run(const char *when)
{
    PyObject *main_module = PyImport_AddModule("__main__");
    PyObject *function = PyCFunction_New(&read_method, NULL);
    PyObject_SetAttrString(main_module, "read_frames", function);
    Py_DecRef(function);
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
        if (Py_FinalizeEx() != 0)
            return 3;
        say("finalised");
    }
    on_thread(native);
    return 0;
}
