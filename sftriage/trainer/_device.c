/* Device time in C: the same as DeviceTime in recording.py, with the driver's own functions, by their addresses.
   `_moments.c` includes this file. Everything here runs under the GIL. */

enum { IN_FLIGHT = 64, HELD = IN_FLIGHT + 2, READ_A_STEP = 4, MAX_MARKS = 1 << 14, DEPTH = 64, BRIEF_NS = 5000 };
enum { DONE = 0, NO_CONTEXT = 201, NOT_READY = 600, RELAXED = 2 };
enum { OTHER_STAGE = 63, ON_STREAM = 128 };
enum { DEVICE_STEP = 208, DEVICE_NUMBER, DEVICE_START, DEVICE_FLAGS, DEVICE_BETWEEN, DEVICE_READY, DEVICE_END };

typedef void *Event, *Stream;

typedef struct {
  Event event;
  union { /* the stage that begins here; of a gradient, the visit */
    unsigned long long stage, visit;
  };
  uint64_t passed_ns; /* since the step began */
} Mark;

typedef struct {
  Mark *at;
  int count, room;
} Marks;

typedef struct { /* a step, and its events */
  uint64_t seq, number, start_ns;
  int capturing;
  Marks marks, ready;
} Timed;

typedef struct {
  PyObject_HEAD
  int (*create)(Event *, unsigned);
  int (*record)(Event, Stream);
  int (*query)(Event);
  int (*elapsed)(float *, Event, Event);
  int (*capturing)(Stream, int *);
  int (*exchange)(int *);
  int (*destroy)(Event);
  PyObject *device_now, *stream_now; /* torch's: the number of the thread's device, and its current stream there */
  PyObject *device;                  /* that of the events */
  PyObject *listener;                /* is also called with each boundary, or None */
  Stream stream;
  Timed steps[HELD];         /* a ring buffer: the step before the first in flight was read last */
  int first, in_flight, before, open, off;
  Marks spare;
  long long marked_ns;
  int depth, stages[DEPTH]; /* the open stages, outermost first */
} Device;

static PyTypeObject *device_type;

OFTEN Device *device_of(Log *log) {
  PyObject *listener = log->listener;
  return listener && Py_TYPE(listener) == device_type ? (Device *)listener : NULL;
}

OFTEN Timed *held(Device *device, int number) { return &device->steps[(device->first + number + HELD) % HELD]; }

/* A place for another mark; NULL without memory. */
static Mark *another(Marks *marks) {
  if (marks->count == marks->room) {
    int room = marks->room ? 2 * marks->room : 32;
    Mark *at = realloc(marks->at, (size_t)room * sizeof(Mark));
    if (!at) return NULL;
    marks->at = at, marks->room = room;
  }
  return &marks->at[marks->count++];
}

static void spare_one(Device *device, Event event) {
  Mark *mark = another(&device->spare);
  if (mark) mark->event = event;
  else device->destroy(event);
}

static void spare(Device *device, Marks *marks) {
  for (int i = 0; i < marks->count; i++) spare_one(device, marks->at[i].event);
  marks->count = 0;
}

static void spare_step(Device *device, Timed *step) { spare(device, &step->marks), spare(device, &step->ready); }

/* Drop all steps, and give the driver its events back. */
static void forget_all(Device *device) {
  for (int i = 0; i < HELD; i++) spare_step(device, &device->steps[i]);
  while (device->spare.count) device->destroy(device->spare.at[--device->spare.count].event);
  device->open = device->in_flight = device->before = 0;
}

SELDOM void device_failed(Log *log, Device *device, const char *what, int number) {
  device->off = 1, device->open = 0;
  PyObject *why = PyUnicode_FromFormat(what, number);
  PyObject *answer = why ? PyObject_CallMethod(log->recording, "device_failed", "O", why) : NULL;
  Py_XDECREF(why), Py_XDECREF(answer);
  PyErr_Clear();
}

/* The current stream of this thread on the events' device; -1 if torch fails. */
static int current_stream(Device *device, Stream *found) {
  PyObject *stream = PyObject_CallFunctionObjArgs(device->stream_now, device->device, NULL);
  *found = stream ? PyLong_AsVoidPtr(stream) : NULL;
  Py_XDECREF(stream);
  return PyErr_Occurred() ? (PyErr_Clear(), -1) : 0;
}

/* Whether this thread works on the events' device; -1 if torch fails. */
static int same_device(Device *device, PyObject **current) {
  *current = PyObject_CallNoArgs(device->device_now);
  int same = *current ? PyObject_RichCompareBool(*current, device->device, Py_EQ) : -1;
  if (same < 0) PyErr_Clear();
  return same;
}

/* Record an event on a stream, now; DONE, or the driver's error. */
static int recorded(Device *device, Stream stream, Event *event) {
  int mode = RELAXED, status = DONE;
  if (device->spare.count) {
    *event = device->spare.at[--device->spare.count].event;
  } else {
    /* A thread that captures a graph must not make one otherwise. */
    device->exchange(&mode);
    status = device->create(event, 0);
    device->exchange(&mode);
    if (status != DONE) return status;
  }
  status = device->record(*event, stream);
  if (status != DONE) spare_one(device, *event);
  return status;
}

static int is_capturing(Device *device) {
  Stream current;
  int capturing = 0;
  if (current_stream(device, &current)) return 1;
  return device->capturing(current, &capturing) != DONE || capturing;
}

static void device_mark(Log *log, Device *device, int stage, long long at_ns, int last) {
  Timed *step = held(device, device->in_flight);
  Marks *marks = &step->marks;
  /* Between two boundaries that lie so close nothing was launched: one event is enough for both. A stage that is
     entered again is another visit to it. */
  Mark *before = marks->count ? &marks->at[marks->count - 1] : NULL;
  if (before && before->stage == OTHER_STAGE && at_ns - device->marked_ns < BRIEF_NS &&
      (last ? marks->count > 1 : marks->count < 2 || before[-1].stage != (unsigned)stage)) {
    before->stage = (unsigned)stage;
    return;
  }
  /* An event in a captured graph has no time, and a query would spoil the graph. */
  if (is_capturing(device)) {
    device->open = 0;
    spare_step(device, step);
    return;
  }
  if (marks->count == MAX_MARKS) {
    device_failed(log, device, "a step went from stage to stage %d times", MAX_MARKS);
    return;
  }
  Mark *mark = another(marks);
  if (!mark) {
    device_failed(log, device, "no memory for %d boundaries", marks->count + 1);
    return;
  }
  int status = recorded(device, device->stream, &mark->event);
  mark->stage = (unsigned)stage;
  if (status != DONE) {
    marks->count--;
    device->open = 0;
    /* (a thread has a context from when it first uses the device, which may be in this very step) */
    if (status != NO_CONTEXT) device_failed(log, device, "CUDA error %d", status);
    return;
  }
  device->marked_ns = now(log);
}

SELDOM void device_begin(Log *log, Device *device, long long number, long long at_ns) {
  device->open = device->depth = 0;
  if (device->off || device->in_flight >= IN_FLIGHT - 1) return;
  PyObject *current;
  int same = same_device(device, &current);
  if (!same) { /* its events are of another context */
    forget_all(device);
    PyObject *was = device->device;
    device->device = current, current = was;
  }
  Py_XDECREF(current);
  if (same < 0 || current_stream(device, &device->stream)) return;
  Timed *step = held(device, device->in_flight);
  spare_step(device, step);
  step->seq = log->published + 1, step->number = (uint64_t)number, step->start_ns = (uint64_t)at_ns;
  step->capturing = 0;
  device->open = 1;
  device_mark(log, device, OTHER_STAGE, at_ns, 0);
}

SELDOM void device_follow(Log *log, Device *device, unsigned long long code, long long at_ns) {
  int stage = (int)(code >> 1), at = device->depth - 1;
  if (!(code & 1)) {
    if (device->depth < DEPTH) device->stages[device->depth++] = stage;
  } else {
    while (at >= 0 && device->stages[at] != stage) at--;
    if (at >= 0) device->depth = at;
  }
  if (device->open) device_mark(log, device, device->depth ? device->stages[device->depth - 1] : OTHER_STAGE, at_ns, 0);
}

SELDOM void device_end(Log *log, Device *device, long long at_ns, int incomplete) {
  Timed *step = held(device, device->in_flight);
  if (device->open) device_mark(log, device, OTHER_STAGE, at_ns, 1);
  if (!device->open) return;
  device->open = 0;
  if (incomplete) spare_step(device, step);
  else device->in_flight++;
}

/* Whether the device has finished a step: DONE, NOT_READY, or the driver's error. */
static int reached(Device *device, Timed *step) {
  int status = device->query(step->marks.at[step->marks.count - 1].event);
  for (int i = 0; status == DONE && i < step->ready.count; i++) status = device->query(step->ready.at[i].event);
  return status;
}

static int since(Device *device, Event start, Event end, uint64_t *passed_ns) {
  float passed_ms = 0;
  int status = device->elapsed(&passed_ms, start, end);
  *passed_ns = passed_ms > 0 ? (uint64_t)((double)passed_ms * 1e6 + 0.5) : 0;
  return status;
}

/* Write a step; DONE, or the driver's error. */
static int read_one(Log *log, Device *device, Timed *step) {
  Timed *before = device->before ? held(device, -1) : NULL;
  Event first = step->marks.at[0].event;
  uint64_t between_ns = 0, so_far_ns = 0;
  int status = DONE;
  /* Compute all before anything is written: a step is there as a whole, or not at all. */
  if (before && before->seq + 1 == step->seq)
    status = since(device, before->marks.at[before->marks.count - 1].event, first, &between_ns);
  for (int i = 0; status == DONE && i < step->ready.count; i++)
    status = since(device, first, step->ready.at[i].event, &step->ready.at[i].passed_ns);
  step->marks.at[0].passed_ns = 0;
  for (int i = 1; status == DONE && i < step->marks.count; i++) {
    /* Each from the first event, so that rounded parts sum to the whole. */
    Mark *mark = &step->marks.at[i];
    status = since(device, first, mark->event, &mark->passed_ns);
    if (mark->passed_ns < so_far_ns) mark->passed_ns = so_far_ns;
    so_far_ns = mark->passed_ns;
  }
  if (status != DONE) return status;
  put(log, DEVICE_STEP, step->seq), put(log, DEVICE_NUMBER, step->number), put(log, DEVICE_START, step->start_ns);
  put(log, DEVICE_FLAGS, (uint64_t)step->capturing), put(log, DEVICE_BETWEEN, between_ns);
  for (int i = 0; i < step->ready.count; i++) put(log, DEVICE_READY, step->ready.at[i].passed_ns);
  for (int i = 0; i < step->marks.count; i++) {
    Mark *mark = &step->marks.at[i];
    put(log, i == step->marks.count - 1 ? DEVICE_END : ON_STREAM + mark->stage, mark->passed_ns);
  }
  return DONE;
}

/* Write the oldest steps that the device has finished, at most `most`, between two steps. */
SELDOM void device_settle(Log *log, Device *device, int most) {
  if (device->off || !device->in_flight) return;
  int mode = RELAXED, status = DONE; /* otherwise a query would end a graph that is being captured */
  device->exchange(&mode);
  while (most-- && device->in_flight) {
    Timed *step = held(device, 0);
    if ((status = reached(device, step)) != DONE || (status = read_one(log, device, step)) != DONE) break;
    /* Kept, because the time to the beginning of the next step needs its end. */
    if (device->before) spare_step(device, held(device, -1));
    device->before = 1, device->in_flight--;
    device->first = (device->first + 1) % HELD;
  }
  device->exchange(&mode);
  if (status != DONE && status != NOT_READY) device_failed(log, device, "CUDA error %d", status);
}

/* Another gradient of a visit to the split sync stage has been launched, in any thread. */
static PyObject *device_gradient(PyObject *self, PyObject *visit) {
  Device *device = (Device *)self;
  unsigned long long wanted = PyLong_AsUnsignedLongLong(visit);
  if (PyErr_Occurred()) return NULL;
  Timed *step = held(device, device->in_flight);
  PyObject *current = NULL;
  Stream stream;
  int capturing = 0, same = device->open ? same_device(device, &current) : 0;
  Py_XDECREF(current);
  if (same <= 0 || current_stream(device, &stream)) Py_RETURN_NONE; /* two devices have two clocks */
  if (device->capturing(stream, &capturing) != DONE || capturing) Py_RETURN_NONE;
  Marks *ready = &step->ready;
  Mark *mark = ready->count ? &ready->at[ready->count - 1] : NULL;
  if (mark && mark->visit == wanted) {
    device->record(mark->event, stream);
    Py_RETURN_NONE;
  }
  if (ready->count == MAX_MARKS || !(mark = another(ready))) Py_RETURN_NONE;
  mark->visit = wanted;
  if (recorded(device, stream, &mark->event) != DONE) ready->count--;
  Py_RETURN_NONE;
}

/* Note of the ending step whether it was captured, and the visits whose last gradient is known. */
static PyObject *device_note(PyObject *self, PyObject *arguments) {
  Device *device = (Device *)self;
  PyObject *visits;
  int capturing, kept = 0;
  if (!PyArg_ParseTuple(arguments, "pO", &capturing, &visits)) return NULL;
  Timed *step = held(device, device->in_flight);
  step->capturing = capturing;
  for (int i = 0; device->open && i < step->ready.count; i++) {
    PyObject *visit = PyLong_FromUnsignedLongLong(step->ready.at[i].visit);
    int known = visit ? PySequence_Contains(visits, visit) : -1;
    Py_XDECREF(visit);
    if (known < 0) return NULL;
    Mark mark = step->ready.at[i];
    if (known) step->ready.at[kept++] = mark;
    else spare_one(device, mark.event);
  }
  if (device->open) step->ready.count = kept;
  Py_RETURN_NONE;
}

/* Write the steps that the device has finished, and free the events. A second call does nothing. */
static PyObject *device_close(PyObject *self, PyObject *log) {
  Device *device = (Device *)self;
  if (Py_TYPE(log) != log_type) return PyErr_SetString(PyExc_TypeError, "a log"), NULL;
  if (((Log *)log)->map) device_settle((Log *)log, device, IN_FLIGHT);
  device->off = 1;
  Py_CLEAR(device->listener);
  forget_all(device);
  Py_RETURN_NONE;
}

static int device_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Device *device = (Device *)self;
  unsigned long long of[7];
  PyObject *device_now, *stream_now;
  if (!PyArg_ParseTuple(arguments, "(KKKKKKK)OO", &of[0], &of[1], &of[2], &of[3], &of[4], &of[5], &of[6], &device_now,
                        &stream_now))
    return -1;
  device->create = (int (*)(Event *, unsigned))(uintptr_t)of[0];
  device->record = (int (*)(Event, Stream))(uintptr_t)of[1];
  device->query = (int (*)(Event))(uintptr_t)of[2];
  device->elapsed = (int (*)(float *, Event, Event))(uintptr_t)of[3];
  device->capturing = (int (*)(Stream, int *))(uintptr_t)of[4];
  device->exchange = (int (*)(int *))(uintptr_t)of[5];
  device->destroy = (int (*)(Event))(uintptr_t)of[6];
  Py_INCREF(device_now), device->device_now = device_now;
  Py_INCREF(stream_now), device->stream_now = stream_now;
  device->device = PyObject_CallNoArgs(device_now);
  return device->device ? 0 : -1;
}

static void device_dealloc(PyObject *self) {
  Device *device = (Device *)self;
  for (int i = 0; i < HELD; i++) free(device->steps[i].marks.at), free(device->steps[i].ready.at);
  free(device->spare.at);
  Py_XDECREF(device->device_now), Py_XDECREF(device->stream_now), Py_XDECREF(device->device);
  Py_XDECREF(device->listener);
  freed(self);
}

static PyMethodDef device_methods[] = {
    {"gradient", device_gradient, METH_O, "Another gradient of this visit has been launched."},
    {"note", device_note, METH_VARARGS, "Of the open step: is it captured, and of which visits is the last gradient known."},
    {"close", device_close, METH_O, "Write down what the device is through with by now. A second call does nothing."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef device_members[] = {
    {"listener", T_OBJECT, offsetof(Device, listener), 0, "is called with the code of each boundary, or None"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot device_slots[] = {
    {Py_tp_doc, "Device time of one log, recorded by the log itself where this is its listener."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, device_init}, {Py_tp_dealloc, device_dealloc},
    {Py_tp_methods, device_methods}, {Py_tp_members, device_members}, {0, NULL},
};
