/* The writer of moments in C: the same types and the same bytes as in moments.py, which documents them; layout.py has
   the format. Stable ABI, CPython 3.10 and newer: one binary an architecture.

   A boundary reads the clock by the vDSO and stores one word. All unusual cases are left to Python: the methods begin,
   end and stray of the recording that owns the log, and step and stage of the monitor.

   In a training loop the caches are cold, and the memory that a boundary touches costs more than its instructions:
   hence one type for stages and steps, a log's fields for a boundary in one place, and no Python frame.

   The build compiles seams/_seam.c, which includes this file: a seam enters and leaves stages itself. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#define _GNU_SOURCE /* MAP_POPULATE: no step pays for a page that it is the first to touch */
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/mman.h>
#include <time.h>

enum { LIVE_AT = 3584, LOG_AT = 8192, CLAIMED = 0, OPENED = 1, DOORBELL = 8 };
enum { CODE_AT = 56, BLOCK_WORDS = 512, QUICK = 16 };
enum { BEGIN = 192, END = 193, LEFT = 194, BLOCK = 199, NUMBER = 200 };

typedef struct {
  PyObject_HEAD
  uint64_t *next, *end; /* the next word, and the end of its block */
  unsigned long owner;  /* the thread whose step is open, or 0 */
  PyObject *listener, *clock;
  long long base_ns; /* the origin of times */
  char *map;         /* NULL once closed */
  uint64_t *live;
  long long seen;     /* the doorbell when it was last handled */
  long long number;   /* of the open step, or of the last */
  uint64_t published; /* steps that have ended */
  char ends_slowly;   /* the recording has something to do at the end of a step */
  uint64_t *words;
  uint64_t opened, log_words; /* words before the end of that block, in all; words there are */
  size_t map_bytes;
  PyObject *recording;
} Log;

typedef struct { /* a stage; or the next step, which is entered by BEGIN */
  PyObject_HEAD
  Log *log;
  unsigned long long entering, leaving;
  unsigned long long entered, left;
} Span;

typedef struct {
  PyObject_HEAD
  PyObject *step;
  int known; /* stages that were requested before, with the same objects */
  struct {
    PyObject *name, *stage;
  } quick[QUICK];
} Calls;

static PyTypeObject *log_type, *span_type;

/* Code off the path of a steady step lies apart. */
#define SELDOM __attribute__((noinline, cold)) static
#define OFTEN __attribute__((always_inline)) static inline

SELDOM void next_block(Log *log) {
  uint64_t *block = log->words + log->opened % log->log_words;
  log->opened += BLOCK_WORDS;
  __atomic_store_n(&log->live[CLAIMED], log->opened, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE); /* claim before overwriting */
  for (int i = 1; i < BLOCK_WORDS; i++) __atomic_store_n(&block[i], 0, __ATOMIC_RELAXED);
  __atomic_store_n(block, (uint64_t)BLOCK << CODE_AT | log->published, __ATOMIC_RELAXED);
  __atomic_store_n(&log->live[OPENED], log->opened, __ATOMIC_RELEASE);
  log->next = block + 1, log->end = block + BLOCK_WORDS;
}

OFTEN void put(Log *log, uint64_t code, uint64_t value) {
  if (log->next == log->end) next_block(log);
  __atomic_store_n(log->next++, code << CODE_AT | value, __ATOMIC_RELEASE);
}

OFTEN long long doorbell(Log *log) { return (long long)__atomic_load_n(&log->live[DOORBELL], __ATOMIC_ACQUIRE); }

/* The same as threading.get_ident(). */
OFTEN unsigned long thread(void) { return (unsigned long)pthread_self(); }

SELDOM long long replaced_clock(Log *log) {
  PyObject *read = PyObject_CallObject(log->clock, NULL);
  long long now_ns = read ? PyLong_AsLongLong(read) : -1;
  Py_XDECREF(read);
  if (PyErr_Occurred()) return -1;
  return now_ns > log->base_ns ? now_ns - log->base_ns : 0;
}

/* Nanoseconds since the log began; -1 with an error set. */
OFTEN long long now(Log *log) {
  if (log->clock) return replaced_clock(log);
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (long long)now.tv_sec * 1000000000 + now.tv_nsec - log->base_ns;
}

OFTEN long long note(Log *log, uint64_t code) {
  long long at_ns = now(log);
  if (at_ns >= 0) put(log, code, (uint64_t)at_ns);
  return at_ns;
}

/* The result of a call: None; only exceptions that end a program pass. */
SELDOM PyObject *answered(PyObject *answer) {
  if (answer == NULL && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(), answer = Py_None, Py_INCREF(answer);
  return answer;
}

static void freed(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

#include "_device.c"

OFTEN long long begin(Log *log, long long number) {
  put(log, NUMBER, (uint64_t)number);
  long long at_ns = note(log, BEGIN);
  if (at_ns < 0) return -1;
  log->number = number;
  log->owner = thread();
  Device *device = device_of(log);
  if (device) device_begin(log, device, number, at_ns);
  return at_ns;
}

OFTEN int end(Log *log, uint64_t code) {
  long long at_ns = note(log, code);
  if (at_ns < 0) return -1;
  Device *device = device_of(log);
  if (device) device_end(log, device, at_ns, code == LEFT);
  log->owner = 0;
  log->published++;
  if (device) device_settle(log, device, READ_A_STEP);
  return 0;
}

static PyObject *closed(void) { return PyErr_SetString(PyExc_ValueError, "the log is closed"), NULL; }

/* Span */

SELDOM PyObject *notify(Log *log, unsigned long long code, long long at_ns) {
  Device *device = device_of(log);
  if (device) device_follow(log, device, code, at_ns);
  PyObject *listener = device ? device->listener : log->listener;
  if (!listener || listener == Py_None) Py_RETURN_NONE;
  Py_INCREF(listener); /* it may close the log */
  PyObject *answer = answered(PyObject_CallFunction(listener, "K", code));
  Py_DECREF(listener);
  return answer;
}

OFTEN PyObject *boundary(Log *log, unsigned long long code) {
  if (thread() != log->owner) {
    if (!log->map) Py_RETURN_NONE;
    return answered(PyObject_CallMethod(log->recording, "stray", "K", code));
  }
  long long at_ns = note(log, code);
  if (at_ns < 0) return answered(NULL);
  if (!log->listener || log->listener == Py_None) Py_RETURN_NONE;
  return notify(log, code, at_ns);
}

OFTEN PyObject *next_step(Log *log) {
  if (!log->map) Py_RETURN_NONE;
  if (log->owner || doorbell(log) != log->seen)
    return answered(PyObject_CallMethod(log->recording, "begin", "O", Py_None));
  if (begin(log, log->number + 1) < 0) return answered(NULL);
  Py_RETURN_NONE;
}

OFTEN PyObject *step_over(Log *log, int incomplete) {
  if (!log->map) Py_RETURN_NONE;
  if (log->ends_slowly || thread() != log->owner)
    return answered(PyObject_CallMethod(log->recording, "end", "O", incomplete ? Py_True : Py_False));
  if (end(log, incomplete ? LEFT : END)) return answered(NULL);
  Py_RETURN_NONE;
}

static PyObject *span_enter(PyObject *self, PyObject *ignored) {
  Span *span = (Span *)self;
  if (span->entering == BEGIN) return next_step(span->log);
  span->entered++;
  return boundary(span->log, span->entering);
}

static PyObject *span_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  Span *span = (Span *)self;
  if (span->entering == BEGIN) return step_over(span->log, count > 0 && arguments[0] != Py_None);
  span->left++;
  return boundary(span->log, span->leaving);
}

static int span_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Span *span = (Span *)self;
  unsigned int number = BEGIN / 2;
  if (!PyArg_ParseTuple(arguments, "O!|I", log_type, &span->log, &number)) return -1;
  Py_INCREF(span->log);
  span->entering = 2 * number, span->leaving = 2 * number + 1;
  return 0;
}

/* Calls */

SELDOM PyObject *elsewhere(PyObject *self, const char *method, PyObject *const *given, Py_ssize_t count, PyObject *names) {
  PyObject *called = PyObject_GetAttrString(self, method), *answer = NULL;
  PyObject *positional = PyTuple_New(count), *named = PyDict_New();
  if (called && positional && named) {
    for (Py_ssize_t i = 0; i < count; i++) Py_INCREF(given[i]), PyTuple_SetItem(positional, i, given[i]);
    for (Py_ssize_t i = 0; names && i < PyTuple_Size(names); i++)
      PyDict_SetItem(named, PyTuple_GetItem(names, i), given[count + i]);
    answer = PyObject_Call(called, positional, named);
  }
  Py_XDECREF(called), Py_XDECREF(positional), Py_XDECREF(named);
  return answer;
}

static PyObject *calls_step(PyObject *self, PyObject *const *given, Py_ssize_t count, PyObject *names) {
  PyObject *step = ((Calls *)self)->step;
  if (!step || count || names) return elsewhere(self, "_step_in_python", given, count, names);
  return Py_INCREF(step), step;
}

static PyObject *calls_stage(PyObject *self, PyObject *const *given, Py_ssize_t count, PyObject *names) {
  Calls *calls = (Calls *)self;
  int usual = count == 1 && !names, at = 0;
  while (usual && at < calls->known && calls->quick[at].name != given[0]) at++;
  if (usual && at < calls->known) return Py_INCREF(calls->quick[at].stage), calls->quick[at].stage;
  PyObject *stage = elsewhere(self, "_stage_in_python", given, count, names);
  if (usual && stage && Py_TYPE(stage) == span_type && calls->known < QUICK) {
    Py_INCREF(given[0]), Py_INCREF(stage);
    calls->quick[calls->known].name = given[0], calls->quick[calls->known++].stage = stage;
  }
  return stage;
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

/* Whether the log can use this number. */
static int given(Log *log, PyObject *number, long long *found) {
  *found = PyLong_AsLongLong(number);
  if (*found == -1 && PyErr_Occurred()) return 0;
  return log->map ? 1 : (closed(), 0);
}

static PyObject *log_begin(PyObject *self, PyObject *number) {
  long long wanted, at_ns = -1;
  if (given((Log *)self, number, &wanted)) at_ns = begin((Log *)self, wanted);
  return at_ns < 0 ? NULL : PyLong_FromLongLong(at_ns);
}

static PyObject *log_end(PyObject *self, PyObject *code) {
  long long wanted;
  if (!given((Log *)self, code, &wanted) || end((Log *)self, (uint64_t)wanted)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *log_note(PyObject *self, PyObject *code) {
  long long wanted;
  if (!given((Log *)self, code, &wanted) || note((Log *)self, (uint64_t)wanted) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *log_put(PyObject *self, PyObject *arguments) {
  unsigned long long code, value;
  if (!PyArg_ParseTuple(arguments, "KK", &code, &value)) return NULL;
  if (!((Log *)self)->map) return closed();
  put((Log *)self, code, value);
  Py_RETURN_NONE;
}

static PyObject *log_set_live(PyObject *self, PyObject *arguments) {
  unsigned long long word, value;
  if (!PyArg_ParseTuple(arguments, "KK", &word, &value)) return NULL;
  if (!((Log *)self)->map) return closed();
  __atomic_store_n(&((Log *)self)->live[word], value, __ATOMIC_RELEASE);
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

static void log_dealloc(PyObject *self) {
  Py_XDECREF(log_close(self, NULL));
  freed(self);
}

static void span_dealloc(PyObject *self) {
  Py_XDECREF(((Span *)self)->log);
  freed(self);
}

static void calls_dealloc(PyObject *self) {
  Calls *calls = (Calls *)self;
  Py_XDECREF(calls->step);
  for (int i = 0; i < calls->known; i++) Py_DECREF(calls->quick[i].name), Py_DECREF(calls->quick[i].stage);
  freed(self);
}

static PyMethodDef span_methods[] = {
    {"__enter__", span_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))span_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef span_members[] = {
    {"entered", T_ULONGLONG, offsetof(Span, entered), READONLY, "how often it was entered"},
    {"left", T_ULONGLONG, offsetof(Span, left), READONLY, "how often it was left"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot span_slots[] = {
    {Py_tp_doc, "One stage, or the next step, as a context manager."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, span_init},   {Py_tp_dealloc, span_dealloc},
    {Py_tp_methods, span_methods}, {Py_tp_members, span_members}, {0, NULL},
};

/* Ready */

typedef struct { /* a hook on parameters: see Ready in moments.py */
  PyObject_HEAD
  Span *span;
  PyObject *recording, *order, *notes;
} Ready;

/* Whether to record the moment on the device, too; -1 with an error set. */
static int on_device(Ready *ready, PyObject *device, PyObject *parameter) {
  PyObject *learning = device == Py_None ? NULL : PyObject_GetAttrString(ready->order, "learning");
  if (!learning) return PyErr_Occurred() ? -1 : 0;
  Py_DECREF(learning);
  if (learning == Py_True) return 1;
  PyObject *finals = PyObject_GetAttrString(ready->order, "finals");
  int found = finals ? PySequence_Contains(finals, parameter) : -1;
  return Py_XDECREF(finals), found;
}

static int noted(Ready *ready, PyObject *parameter) {
  unsigned long long visit = ready->span->entered;
  long long at_ns = now(ready->span->log);
  PyObject *note = at_ns < 0 ? NULL : Py_BuildValue("(KLO)", visit, at_ns + ready->span->log->base_ns, parameter);
  PyObject *device = note && !PyList_Append(ready->notes, note) ? PyObject_GetAttrString(ready->recording, "device") : NULL;
  int wanted = device ? on_device(ready, device, parameter) : -1;
  PyObject *answer = wanted > 0 ? PyObject_CallMethod(device, "gradient", "K", visit) : NULL;
  Py_XDECREF(note), Py_XDECREF(device), Py_XDECREF(answer);
  return wanted < 0 || (wanted && !answer) ? -1 : 0;
}

static PyObject *ready_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Ready *ready = (Ready *)self;
  Log *log = ready->span->log;
  if (ready->span->entered == ready->span->left || !log->owner || PyTuple_Size(arguments) < 1) Py_RETURN_NONE;
  PyObject *parameter = PyLong_FromVoidPtr(PyTuple_GetItem(arguments, 0)), *error[3];
  int failed = !parameter || noted(ready, parameter);
  Py_XDECREF(parameter);
  if (failed && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
  if (failed) {
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    PyErr_NormalizeException(&error[0], &error[1], &error[2]);
    if (PyList_Append(ready->notes, error[1])) PyErr_Clear();
    for (int i = 0; i < 3; i++) Py_XDECREF(error[i]);
  }
  Py_RETURN_NONE;
}

static int ready_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Ready *ready = (Ready *)self;
  if (!PyArg_ParseTuple(arguments, "O!OOO!", span_type, &ready->span, &ready->recording, &ready->order, &PyList_Type,
                        &ready->notes))
    return ready->span = NULL, ready->recording = ready->order = ready->notes = NULL, -1;
  Py_INCREF(ready->span), Py_INCREF(ready->recording), Py_INCREF(ready->order), Py_INCREF(ready->notes);
  return 0;
}

static void ready_dealloc(PyObject *self) {
  Ready *ready = (Ready *)self;
  Py_XDECREF(ready->span), Py_XDECREF(ready->recording), Py_XDECREF(ready->order), Py_XDECREF(ready->notes);
  freed(self);
}

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, "What is called when a gradient is ready."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, ready_init}, {Py_tp_dealloc, ready_dealloc}, {Py_tp_call, ready_call}, {0, NULL},
};

static PyMethodDef calls_methods[] = {
    {"step", (PyCFunction)(void (*)(void))calls_step, METH_FASTCALL | METH_KEYWORDS,
     "step($self, /, number=None, kind=None, work=None)\n--\n\nOne training step, as a context manager."},
    {"stage", (PyCFunction)(void (*)(void))calls_stage, METH_FASTCALL | METH_KEYWORDS,
     "stage($self, /, name)\n--\n\nOne stage of the step that is open, as a context manager."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef calls_members[] = {
    {"_step", T_OBJECT_EX, offsetof(Calls, step), 0, "the context manager of an ordinary step"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "What is called in each step of a monitor."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, calls_dealloc}, {Py_tp_methods, calls_methods}, {Py_tp_members, calls_members}, {0, NULL},
};

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
    {"seen", T_LONGLONG, offsetof(Log, seen), 0, "the doorbell when it was last handled"},
    {"listener", T_OBJECT, offsetof(Log, listener), 0, "is called with the code of each boundary, or None"},
    {"ends_slowly", T_BOOL, offsetof(Log, ends_slowly), 0, "whether the recording ends the steps"},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef log_properties[] = {
    {"doorbell", log_get_doorbell, NULL, "the ring's doorbell", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot log_slots[] = {
    {Py_tp_doc, "The mapped log of one rank."}, {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, log_init}, {Py_tp_dealloc, log_dealloc}, {Py_tp_methods, log_methods},
    {Py_tp_members, log_members}, {Py_tp_getset, log_properties}, {0, NULL},
};

static PyType_Spec specs[] = {
    {"sftriage.trainer._moments.Log", sizeof(Log), 0, Py_TPFLAGS_DEFAULT, log_slots},
    {"sftriage.trainer._moments.Span", sizeof(Span), 0, Py_TPFLAGS_DEFAULT, span_slots},
    {"sftriage.trainer._moments.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, calls_slots},
    {"sftriage.trainer._moments.Device", sizeof(Device), 0, Py_TPFLAGS_DEFAULT, device_slots},
    {"sftriage.trainer._moments.Ready", sizeof(Ready), 0, Py_TPFLAGS_DEFAULT, ready_slots},
};

static PyObject *added(PyObject *module, PyType_Spec *spec) {
  PyObject *type = module ? PyType_FromSpec(spec) : NULL;
  if (type && !PyModule_AddObject(module, strrchr(spec->name, '.') + 1, type)) return type;
  Py_XDECREF(type);
  return NULL;
}

/* The module with these types, for the file that is built, which includes this one and has more. */
static PyObject *moments(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_moments", "The writer of moments, in C.", -1, NULL};
  PyObject *made = PyModule_Create(&module);
  log_type = (PyTypeObject *)added(made, &specs[0]), span_type = (PyTypeObject *)added(made, &specs[1]);
  device_type = (PyTypeObject *)added(made, &specs[3]);
  if (!log_type || !span_type || !device_type || !added(made, &specs[2]) || !added(made, &specs[4]))
    Py_CLEAR(made);
  return made;
}
