/* The wrappers and hooks of sftriage.trainer.seams in C, for a job in steady state. In an ordinary step a seam does what
   `StageSteps.enter` and `leave`, and hooks.py, would do, on the same lists; in all other cases it calls them.

   It is compiled into one binary with the recorder's writer, because a seam enters and leaves stages itself. */
#include "../_moments.c"

enum { AROUND, BEFORE, AFTER, MODEL_BEFORE, MODEL_AFTER, KEPT = 11 };

typedef struct {
  PyObject_HEAD
  union { /* its references */
    struct {
      Span *span;
      PyObject *opened, *ready; /* the open stages; empty unless C may enter the stage */
      PyObject *name, *slow, *leave;
      PyObject *stepping, *kinds, *counters; /* of optimizers: see `StageSteps`; the compiler's counters */
      PyObject *gradients;                   /* says whether they are on */
      PyObject *about; /* the function; an optimizer's id; of the hook after a model, the one before it */
    };
    PyObject *kept[KEPT];
  };
  void *ender; /* the optimizer, by its id */
  long long compiled;
  unsigned long long rounds; /* steps that it has ended */
  int role;
  int inside, leads; /* of a model: its calls under way, and whether the first of them entered the stage */
  PyObject *dict;
} Seam;

OFTEN int usual(Seam *seam, Py_ssize_t open) {
  return thread() == seam->span->log->owner && PyList_Size(seam->opened) == open && PyList_Size(seam->ready) > 0 &&
         (!open || PyList_GetItem(seam->opened, 0) == seam->name);
}

OFTEN int enter(Seam *seam) {
  if (PyList_Append(seam->opened, seam->name)) return PyErr_Clear(), 0;
  seam->span->entered++;
  PyObject *answer = boundary(seam->span->log, seam->span->entering);
  Py_XDECREF(answer);
  return answer ? 0 : -1;
}

OFTEN int leave(Seam *seam) {
  PyList_SetSlice(seam->opened, 0, 1, NULL);
  seam->span->left++;
  PyObject *answer = boundary(seam->span->log, seam->span->leaving);
  Py_XDECREF(answer);
  return answer ? 0 : -1;
}

OFTEN PyObject *around(Seam *seam, PyObject *arguments, PyObject *keywords) {
  if (!usual(seam, 0)) return PyObject_Call(seam->slow, arguments, keywords);
  PyObject *answer = enter(seam) ? NULL : PyObject_Call(seam->about, arguments, keywords), *error[3] = {0};
  if (!answer) PyErr_Fetch(&error[0], &error[1], &error[2]);
  if (usual(seam, 1) ? leave(seam) : !answered(PyObject_CallFunctionObjArgs(seam->leave, seam->name, NULL))) {
    Py_CLEAR(answer); /* what ends a program came meanwhile */
    for (int i = 0; i < 3; i++) Py_XDECREF(error[i]);
    return NULL;
  }
  if (!answer) PyErr_Restore(error[0], error[1], error[2]);
  return answer;
}

static PyObject *of_frames, *of_total; /* their names */

static long long frames(PyObject *counters) {
  PyObject *of = PyDict_Check(counters) ? PyDict_GetItem(counters, of_frames) : NULL;
  PyObject *total = of && PyDict_Check(of) ? PyDict_GetItem(of, of_total) : NULL;
  return total ? PyLong_AsLongLong(total) : 0;
}

OFTEN PyObject *before(Seam *seam, PyObject *arguments) {
  if (PyTuple_GetItem(arguments, 0) != seam->ender || !usual(seam, 0) || PyList_Size(seam->stepping))
    return PyObject_Call(seam->slow, arguments, NULL);
  PyObject *id = PyLong_FromVoidPtr(seam->ender);
  int failed = !id || PyList_Append(seam->stepping, id) || enter(seam);
  Py_XDECREF(id);
  if (failed) return answered(NULL);
  Py_RETURN_NONE;
}

OFTEN PyObject *after(Seam *seam, PyObject *arguments) {
  int slow = PyTuple_GetItem(arguments, 0) != seam->ender || !usual(seam, 1) || PyList_Size(seam->stepping) != 1 ||
             PySet_Size(seam->kinds) || frames(seam->counters) != seam->compiled;
  if (slow) return PyObject_Call(seam->slow, arguments, NULL);
  Log *log = seam->span->log;
  PyList_SetSlice(seam->stepping, 0, 1, NULL);
  seam->rounds++;
  if (leave(seam)) return NULL;
  PyObject *answer = step_over(log, 0);
  if (!answer) return NULL;
  Py_DECREF(answer);
  return next_step(log);
}

static PyObject *of_training;

OFTEN int trains(Seam *seam, PyObject *model) {
  PyObject *training = PyObject_GetAttr(model, of_training);
  PyObject *gradients = training == Py_True ? PyObject_CallNoArgs(seam->gradients) : NULL;
  int answer = gradients == Py_True;
  Py_XDECREF(training), Py_XDECREF(gradients), PyErr_Clear();
  return answer;
}

OFTEN PyObject *model_before(Seam *seam, PyObject *arguments) {
  if (usual(seam, 1)) { /* within another model's call, or its own */
    if (!seam->inside++) seam->leads = 0;
  } else if (usual(seam, 0) && trains(seam, PyTuple_GetItem(arguments, 0))) {
    seam->inside = seam->leads = 1;
    if (enter(seam)) return answered(NULL);
  } else {
    if (thread() == seam->span->log->owner) seam->inside = 0;
    return PyObject_Call(seam->slow, arguments, NULL);
  }
  Py_RETURN_NONE;
}

OFTEN PyObject *model_after(Seam *seam, PyObject *arguments) {
  Seam *begun = (Seam *)seam->about;
  if (!begun->inside || thread() != seam->span->log->owner) return PyObject_Call(seam->slow, arguments, NULL);
  if (--begun->inside || !begun->leads) Py_RETURN_NONE;
  if (usual(seam, 1) ? leave(seam) : !answered(PyObject_CallFunctionObjArgs(seam->leave, seam->name, NULL)))
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *seam_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
  Seam *seam = (Seam *)self;
  static PyObject *(*const hooks[])(Seam *, PyObject *) = {before, after, model_before, model_after};
  if (seam->role == AROUND) return around(seam, arguments, keywords);
  if (PyTuple_Size(arguments) < 1) return PyErr_SetString(PyExc_TypeError, "a hook"), NULL;
  return hooks[seam->role - BEFORE](seam, arguments);
}

static PyObject *seam_get(PyObject *self, PyObject *object, PyObject *type) {
  if (!object || object == Py_None) return Py_INCREF(self), self;
  PyObject *types = PyImport_ImportModule("types");
  PyObject *bound = types ? PyObject_CallMethod(types, "MethodType", "OO", self, object) : NULL;
  return Py_XDECREF(types), bound;
}

static PyObject *seam_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  Seam given;
  int role;
  if (!PyArg_ParseTuple(arguments, "iO!O!O!UOOO!O!OOO", &role, span_type, &given.span, &PyList_Type, &given.opened,
                        &PyList_Type, &given.ready, &given.name, &given.slow, &given.leave, &PyList_Type,
                        &given.stepping, &PySet_Type, &given.kinds, &given.counters, &given.gradients, &given.about))
    return NULL;
  if (role < AROUND || role > MODEL_AFTER || (role == MODEL_AFTER && Py_TYPE(given.about) != type))
    return PyErr_SetString(PyExc_TypeError, "a seam needs a role, and what it is about"), NULL;
  void *ender = role == BEFORE || role == AFTER ? PyLong_AsVoidPtr(given.about) : NULL;
  long long compiled = frames(given.counters);
  Seam *seam = PyErr_Occurred() ? NULL : (Seam *)PyType_GenericAlloc(type, 0);
  if (!seam) return NULL;
  seam->role = role, seam->ender = ender, seam->compiled = compiled;
  for (int i = 0; i < KEPT; i++) Py_INCREF(given.kept[i]), seam->kept[i] = given.kept[i];
  return (PyObject *)seam;
}

static int seam_traverse(PyObject *self, visitproc visit, void *arg) {
  Seam *seam = (Seam *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(seam->dict);
  for (int i = 0; i < KEPT; i++) Py_VISIT(seam->kept[i]);
  return 0;
}

static int seam_clear(PyObject *self) {
  Py_CLEAR(((Seam *)self)->dict);
  return 0;
}

static void seam_dealloc(PyObject *self) {
  Seam *seam = (Seam *)self;
  PyObject_GC_UnTrack(self);
  for (int i = 0; i < KEPT; i++) Py_XDECREF(seam->kept[i]);
  Py_XDECREF(seam->dict);
  freed(self);
}

static PyMemberDef seam_members[] = {
    {"rounds", T_ULONGLONG, offsetof(Seam, rounds), READONLY, "steps that it has ended"},
    {"compiled", T_LONGLONG, offsetof(Seam, compiled), 0, "frames that had been compiled by the last step's end"},
    {"__dictoffset__", T_PYSSIZET, offsetof(Seam, dict), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef seam_properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot seam_slots[] = {
    {Py_tp_doc, "A function of torch that is a stage, or a hook of an optimizer's step or of a model."},
    {Py_tp_new, seam_new}, {Py_tp_dealloc, seam_dealloc}, {Py_tp_call, seam_call}, {Py_tp_descr_get, seam_get},
    {Py_tp_traverse, seam_traverse}, {Py_tp_clear, seam_clear}, {Py_tp_members, seam_members},
    {Py_tp_getset, seam_properties}, {0, NULL},
};
static PyType_Spec seam_spec = {"sftriage.trainer._moments.Seam", sizeof(Seam), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR, seam_slots};

PyMODINIT_FUNC PyInit__moments(void) {
  of_frames = PyUnicode_InternFromString("frames"), of_total = PyUnicode_InternFromString("total");
  of_training = PyUnicode_InternFromString("training");
  PyObject *made = of_frames && of_total && of_training ? moments() : NULL;
  if (!added(made, &seam_spec)) Py_CLEAR(made);
  return made;
}
