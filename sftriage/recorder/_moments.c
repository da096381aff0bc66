/* The writer of moments, in C: the same three types, and the same bytes, as in moments.py, which says what they are for;
   layout.py has the format. Stable ABI, CPython 3.10 and newer: one binary an architecture.

   A boundary reads the clock by the vDSO and stores one word. All else, whatever is not as usual, is Python's: the
   methods begin, end and stray of the recording that owns the log. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#define _GNU_SOURCE /* MAP_POPULATE: no step pays for a page that it is the first to touch */
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <sys/mman.h>
#include <time.h>

enum { LIVE_AT = 3584, LOG_AT = 8192, CLAIMED = 0, OPENED = 1, DOORBELL = 8 };
enum { CODE_AT = 56, BLOCK_WORDS = 512 };
enum { BEGIN = 192, END = 193, LEFT = 194, BLOCK = 199, NUMBER = 200 };

typedef struct {
  PyObject_HEAD
  char *map; /* NULL once closed */
  size_t map_bytes;
  uint64_t *live, *words;
  uint64_t *next, *end;       /* where the next word goes; where its block ends */
  uint64_t opened, log_words; /* words before the end of that block, in all; words there are */
  uint64_t published;         /* steps that have ended */
  long long base_ns;          /* what times are counted from */
  long long number;           /* of the step that is open, or of the last one */
  unsigned long owner;        /* the thread whose step is open, or 0 */
  long long seen;             /* the doorbell as it was answered last */
  char ends_slowly;           /* the recording has something to do at the end of a step */
  PyObject *recording, *listener, *clock;
} Log;

typedef struct {
  PyObject_HEAD
  Log *log;
  unsigned long long entering, leaving;
  unsigned long long entered, left;
} Stage;

typedef struct {
  PyObject_HEAD
  Log *log;
} Step;

static PyTypeObject *log_type;

static void next_block(Log *log) {
  uint64_t *block = log->words + log->opened % log->log_words;
  log->opened += BLOCK_WORDS;
  __atomic_store_n(&log->live[CLAIMED], log->opened, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE); /* claimed first, overwritten then */
  for (int i = 1; i < BLOCK_WORDS; i++) __atomic_store_n(&block[i], 0, __ATOMIC_RELAXED);
  __atomic_store_n(block, (uint64_t)BLOCK << CODE_AT | log->published, __ATOMIC_RELAXED);
  __atomic_store_n(&log->live[OPENED], log->opened, __ATOMIC_RELEASE);
  log->next = block + 1, log->end = block + BLOCK_WORDS;
}

static void put(Log *log, uint64_t code, uint64_t value) {
  if (log->next == log->end) next_block(log);
  __atomic_store_n(log->next++, code << CODE_AT | value, __ATOMIC_RELEASE);
}

static long long doorbell(Log *log) { return (long long)__atomic_load_n(&log->live[DOORBELL], __ATOMIC_ACQUIRE); }

/* Nanoseconds since the log began; -1 with an error set. */
static long long now(Log *log) {
  if (log->clock) {
    PyObject *read = PyObject_CallObject(log->clock, NULL);
    long long now_ns = read ? PyLong_AsLongLong(read) : -1;
    Py_XDECREF(read);
    if (PyErr_Occurred()) return -1;
    return now_ns > log->base_ns ? now_ns - log->base_ns : 0;
  }
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (long long)now.tv_sec * 1000000000 + now.tv_nsec - log->base_ns;
}

static long long note(Log *log, uint64_t code) {
  long long at_ns = now(log);
  if (at_ns >= 0) put(log, code, (uint64_t)at_ns);
  return at_ns;
}

static long long begin(Log *log, long long number) {
  put(log, NUMBER, (uint64_t)number);
  long long at_ns = note(log, BEGIN);
  if (at_ns < 0) return -1;
  log->number = number;
  log->owner = PyThread_get_thread_ident();
  return at_ns;
}

static int end(Log *log, uint64_t code) {
  if (note(log, code) < 0) return -1;
  log->owner = 0;
  log->published++;
  return 0;
}

/* What was called returns None, or raises nothing but what ends a program. */
static PyObject *answered(PyObject *answer) {
  if (answer == NULL && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(), answer = Py_None, Py_INCREF(answer);
  return answer;
}

static PyObject *closed(void) {
  PyErr_SetString(PyExc_ValueError, "the log is closed");
  return NULL;
}

/* Stage */

static PyObject *boundary(Stage *stage, unsigned long long code) {
  Log *log = stage->log;
  if (!log->map) Py_RETURN_NONE;
  if (PyThread_get_thread_ident() != log->owner) return answered(PyObject_CallMethod(log->recording, "stray", "K", code));
  if (note(log, code) < 0) return answered(NULL);
  PyObject *listener = log->listener;
  if (!listener) Py_RETURN_NONE;
  Py_INCREF(listener); /* it may close the log */
  PyObject *answer = answered(PyObject_CallFunction(listener, "K", code));
  Py_DECREF(listener);
  return answer;
}

static PyObject *stage_enter(PyObject *self, PyObject *ignored) {
  Stage *stage = (Stage *)self;
  stage->entered++;
  return boundary(stage, stage->entering);
}

static PyObject *stage_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  Stage *stage = (Stage *)self;
  stage->left++;
  return boundary(stage, stage->leaving);
}

static int stage_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Stage *stage = (Stage *)self;
  unsigned int number;
  if (!PyArg_ParseTuple(arguments, "O!I", log_type, &stage->log, &number)) return -1;
  Py_INCREF(stage->log);
  stage->entering = 2 * number, stage->leaving = 2 * number + 1;
  return 0;
}

/* Step */

static PyObject *step_enter(PyObject *self, PyObject *ignored) {
  Log *log = ((Step *)self)->log;
  if (!log->map) Py_RETURN_NONE;
  if (log->owner || doorbell(log) != log->seen)
    return answered(PyObject_CallMethod(log->recording, "begin", "O", Py_None));
  if (begin(log, log->number + 1) < 0) return answered(NULL);
  Py_RETURN_NONE;
}

static PyObject *step_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  Log *log = ((Step *)self)->log;
  int incomplete = count > 0 && arguments[0] != Py_None;
  if (!log->map) Py_RETURN_NONE;
  if (log->ends_slowly || PyThread_get_thread_ident() != log->owner)
    return answered(PyObject_CallMethod(log->recording, "end", "O", incomplete ? Py_True : Py_False));
  if (end(log, incomplete ? LEFT : END)) return answered(NULL);
  Py_RETURN_NONE;
}

static int step_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Step *step = (Step *)self;
  if (!PyArg_ParseTuple(arguments, "O!", log_type, &step->log)) return -1;
  Py_INCREF(step->log);
  return 0;
}

/* Log */

static int log_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Log *log = (Log *)self;
  int descriptor;
  unsigned long long log_words;
  PyObject *recording, *clock = Py_None;
  if (!PyArg_ParseTuple(arguments, "iKLO|O", &descriptor, &log_words, &log->base_ns, &recording, &clock))
    return -1;
  log->map_bytes = LOG_AT + 8 * log_words;
  char *map = mmap(NULL, log->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (map == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError), -1;
  log->map = map;
  log->live = (uint64_t *)(map + LIVE_AT), log->words = (uint64_t *)(map + LOG_AT);
  log->log_words = log_words;
  log->number = log->seen = -1;
  if (clock != Py_None) Py_INCREF(clock), log->clock = clock;
  Py_INCREF(recording), log->recording = recording;
  return 0;
}

static PyObject *log_begin(PyObject *self, PyObject *number) {
  Log *log = (Log *)self;
  long long wanted = PyLong_AsLongLong(number);
  if (wanted == -1 && PyErr_Occurred()) return NULL;
  if (!log->map) return closed();
  long long at_ns = begin(log, wanted);
  return at_ns < 0 ? NULL : PyLong_FromLongLong(at_ns);
}

static PyObject *log_end(PyObject *self, PyObject *code) {
  Log *log = (Log *)self;
  unsigned long long wanted = PyLong_AsUnsignedLongLong(code);
  if (PyErr_Occurred()) return NULL;
  if (!log->map) return closed();
  if (end(log, wanted)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *log_note(PyObject *self, PyObject *code) {
  Log *log = (Log *)self;
  unsigned long long wanted = PyLong_AsUnsignedLongLong(code);
  if (PyErr_Occurred()) return NULL;
  if (!log->map) return closed();
  if (note(log, wanted) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *log_put(PyObject *self, PyObject *arguments) {
  Log *log = (Log *)self;
  unsigned long long code, value;
  if (!PyArg_ParseTuple(arguments, "KK", &code, &value)) return NULL;
  if (!log->map) return closed();
  put(log, code, value);
  Py_RETURN_NONE;
}

static PyObject *log_set_live(PyObject *self, PyObject *arguments) {
  Log *log = (Log *)self;
  unsigned int word;
  unsigned long long value;
  if (!PyArg_ParseTuple(arguments, "IK", &word, &value)) return NULL;
  if (!log->map) return closed();
  __atomic_store_n(&log->live[word], value, __ATOMIC_RELEASE);
  Py_RETURN_NONE;
}

static PyObject *log_close(PyObject *self, PyObject *ignored) {
  Log *log = (Log *)self;
  if (log->map) munmap(log->map, log->map_bytes);
  log->map = NULL, log->owner = 0;
  Py_CLEAR(log->recording);
  Py_CLEAR(log->listener);
  Py_CLEAR(log->clock);
  Py_RETURN_NONE;
}

static PyObject *log_get_doorbell(PyObject *self, void *ignored) {
  Log *log = (Log *)self;
  return log->map ? PyLong_FromLongLong(doorbell(log)) : closed();
}

static PyObject *log_get_listener(PyObject *self, void *ignored) {
  PyObject *listener = ((Log *)self)->listener;
  if (!listener) listener = Py_None;
  Py_INCREF(listener);
  return listener;
}

static int log_set_listener(PyObject *self, PyObject *listener, void *ignored) {
  Log *log = (Log *)self;
  PyObject *before = log->listener;
  if (listener == Py_None) listener = NULL;
  Py_XINCREF(listener), log->listener = listener;
  Py_XDECREF(before);
  return 0;
}

static void freed(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static void log_dealloc(PyObject *self) {
  Py_XDECREF(log_close(self, NULL));
  freed(self);
}

static void of_log_dealloc(PyObject *self) { /* a Stage or a Step: both begin alike */
  Py_XDECREF(((Step *)self)->log);
  freed(self);
}

static PyMethodDef stage_methods[] = {
    {"__enter__", stage_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))stage_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef stage_members[] = {
    {"entered", T_ULONGLONG, offsetof(Stage, entered), READONLY, "how often it was entered"},
    {"left", T_ULONGLONG, offsetof(Stage, left), READONLY, "how often it was left"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot stage_slots[] = {
    {Py_tp_doc, "One stage, as a context manager."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, stage_init},   {Py_tp_dealloc, of_log_dealloc},
    {Py_tp_methods, stage_methods}, {Py_tp_members, stage_members}, {0, NULL},
};
static PyType_Spec stage_spec = {"sftriage.recorder._moments.Stage", sizeof(Stage), 0, Py_TPFLAGS_DEFAULT, stage_slots};

static PyMethodDef step_methods[] = {
    {"__enter__", step_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))step_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot step_slots[] = {
    {Py_tp_doc, "The next step, as a context manager."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, step_init}, {Py_tp_dealloc, of_log_dealloc}, {Py_tp_methods, step_methods}, {0, NULL},
};
static PyType_Spec step_spec = {"sftriage.recorder._moments.Step", sizeof(Step), 0, Py_TPFLAGS_DEFAULT, step_slots};

static PyMethodDef log_methods[] = {
    {"begin", log_begin, METH_O, "Begin a step of this number, of the thread that calls."},
    {"end", log_end, METH_O, "End the step with END or LEFT, and publish it."},
    {"note", log_note, METH_O, "Note a moment, now."},
    {"put", log_put, METH_VARARGS, "Put a code with its value."},
    {"set_live", log_set_live, METH_VARARGS, "Store a live word."},
    {"close", log_close, METH_NOARGS, "Unmap the files; what was written stays. A second call does nothing."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef log_members[] = {
    {"owner", T_ULONG, offsetof(Log, owner), 0, "the thread whose step is open, or 0"},
    {"number", T_LONGLONG, offsetof(Log, number), 0, "of the step that is open, or of the last one"},
    {"published", T_ULONGLONG, offsetof(Log, published), READONLY, "steps that have ended"},
    {"seen", T_LONGLONG, offsetof(Log, seen), 0, "the doorbell as it was answered last"},
    {"ends_slowly", T_BOOL, offsetof(Log, ends_slowly), 0, "whether the recording is asked at the end of a step"},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef log_properties[] = {
    {"doorbell", log_get_doorbell, NULL, "the ring's doorbell", NULL},
    {"listener", log_get_listener, log_set_listener, "is called with the code of each boundary", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot log_slots[] = {
    {Py_tp_doc, "The mapped log of one rank."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, log_init}, {Py_tp_dealloc, log_dealloc}, {Py_tp_methods, log_methods},
    {Py_tp_members, log_members}, {Py_tp_getset, log_properties}, {0, NULL},
};
static PyType_Spec log_spec = {"sftriage.recorder._moments.Log", sizeof(Log), 0, Py_TPFLAGS_DEFAULT, log_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_moments", "The writer of moments, in C.", -1, NULL};

PyMODINIT_FUNC PyInit__moments(void) {
  static struct { const char *name; PyType_Spec *spec; } types[] = {{"Log", &log_spec}, {"Stage", &stage_spec}, {"Step", &step_spec}};
  PyObject *made = PyModule_Create(&module);
  for (size_t i = 0; made && i < sizeof types / sizeof *types; i++) {
    PyObject *type = PyType_FromSpec(types[i].spec);
    if (i == 0) log_type = (PyTypeObject *)type;
    if (!type || PyModule_AddObject(made, types[i].name, type)) {
      Py_XDECREF(type);
      Py_CLEAR(made);
    }
  }
  return made;
}
