// SPDX-License-Identifier: Apache-2.0
// The Python module `nvrx_cupti_module`, written for the limited API: one binary for Python 3.10
// and later. The GIL is released around everything that calls CUPTI.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdio>
#include <limits>
#include <new>

#include "capture.h"

namespace {

using nvrx::Candidate;
using nvrx::Capture;
using nvrx::CaptureOptions;
using nvrx::KernelSummary;

struct KernelStats {
  PyObject_HEAD double min, max, median, avg, stddev;
  long long num_calls, total_calls;
  double total_time_us;
};

struct Profiler {
  PyObject_HEAD
};

PyTypeObject* stats_type = nullptr;
bool has_profiler = false;  // under the GIL

// Run `body` without the GIL; a C++ exception becomes a RuntimeError and the result false.
template <typename Body>
bool without_gil(Body body) {
  std::string error;
  bool is_memory = false;
  PyThreadState* thread = PyEval_SaveThread();
  try {
    body();
  } catch (const std::bad_alloc&) {
    is_memory = true;
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  PyEval_RestoreThread(thread);
  if (is_memory) {
    PyErr_NoMemory();
    return false;
  }
  if (error.empty()) return true;
  // With the name of a file, which may be any bytes.
  PyObject* text = PyUnicode_DecodeUTF8(error.data(), error.size(), "replace");
  if (text != nullptr) PyErr_SetObject(PyExc_RuntimeError, text);
  Py_XDECREF(text);
  return false;
}

void notice(const char* text) { std::fprintf(stderr, "nvrx_cupti_module: %s\n", text); }

PyObject* stats_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static char* names[] = {nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":KernelStats", names)) return nullptr;
  auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  auto* self = reinterpret_cast<KernelStats*>(alloc(type, 0));
  if (self == nullptr) return nullptr;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  self->min = self->max = self->median = self->avg = self->stddev = nan;
  return reinterpret_cast<PyObject*>(self);
}

void object_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* stats_text(PyObject* object) {
  auto* self = reinterpret_cast<KernelStats*>(object);
  char text[256];
  std::snprintf(text, sizeof text,
                "KernelStats(min=%g, max=%g, median=%g, avg=%g, stddev=%g, num_calls=%lld)",
                self->min, self->max, self->median, self->avg, self->stddev, self->num_calls);
  return PyUnicode_FromString(text);
}

PyMemberDef stats_members[] = {
    {"min", T_DOUBLE, offsetof(KernelStats, min), 0, "Least duration, us."},
    {"max", T_DOUBLE, offsetof(KernelStats, max), 0, "Greatest duration, us."},
    {"median", T_DOUBLE, offsetof(KernelStats, median), 0, "Median duration, us."},
    {"avg", T_DOUBLE, offsetof(KernelStats, avg), 0, "Mean duration, us."},
    {"stddev", T_DOUBLE, offsetof(KernelStats, stddev), 0, "Standard deviation, us."},
    {"num_calls", T_LONGLONG, offsetof(KernelStats, num_calls), 0, "Samples in the window."},
    {"total_calls", T_LONGLONG, offsetof(KernelStats, total_calls), 0, "Calls since the reset."},
    {"total_time_us", T_DOUBLE, offsetof(KernelStats, total_time_us), 0, "Their time, us."},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot stats_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(stats_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(object_free)},
    {Py_tp_str, reinterpret_cast<void*>(stats_text)},
    {Py_tp_repr, reinterpret_cast<void*>(stats_text)},
    {Py_tp_members, stats_members},
    {Py_tp_doc, const_cast<char*>("Durations of one kernel in microseconds.")},
    {0, nullptr},
};

PyType_Spec stats_spec = {"nvrx_cupti_module.KernelStats", sizeof(KernelStats), 0,
                          Py_TPFLAGS_DEFAULT, stats_slots};

PyObject* profiler_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static char* names[] = {const_cast<char*>("bufferSize"),
                          const_cast<char*>("numBuffers"),
                          const_cast<char*>("statsMaxLenPerKernel"),
                          const_cast<char*>("maxBufferBytes"),
                          const_cast<char*>("maxKernels"),
                          nullptr};
  const CaptureOptions defaults;
  Py_ssize_t size = defaults.buffer_size, buffers = defaults.buffers, window = defaults.window,
             bytes = defaults.max_buffer_bytes, kernels = defaults.max_kernels;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|nnnnn:CuptiProfiler", names, &size, &buffers,
                                   &window, &bytes, &kernels)) {
    return nullptr;
  }
  if (size < 1024 || buffers < 1 || window < 1 || bytes < size || kernels < 1) {
    PyErr_SetString(PyExc_ValueError,
                    "CuptiProfiler: bufferSize must be at least 1024, maxBufferBytes at least"
                    " bufferSize, the other numbers at least 1");
    return nullptr;
  }
  if (has_profiler) {
    PyErr_SetString(PyExc_RuntimeError, "CuptiProfiler exists already; a process has one");
    return nullptr;
  }
  CaptureOptions options;
  options.buffer_size = size;
  options.buffers = buffers;
  options.window = window;
  options.max_buffer_bytes = bytes;
  options.max_kernels = kernels;
  if (!without_gil([&] { Capture::instance().configure(options); })) return nullptr;
  auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = alloc(type, 0);
  has_profiler = self != nullptr;
  return self;
}

void profiler_free(PyObject* self) {
  has_profiler = false;
  try {
    Capture::instance().shutdown();
  } catch (const std::exception& error) {
    notice(error.what());
  }
  object_free(self);
}

// Ask the package which libraries to try.
bool read_candidates(std::vector<Candidate>& found) {
  PyObject* module = PyImport_ImportModule("nvidia_resiliency_ext.attribution.straggler._cupti_library");
  if (module == nullptr) return false;
  PyObject* list = PyObject_CallMethod(module, "candidates", nullptr);
  Py_DECREF(module);
  if (list == nullptr) return false;
  bool ok = true;
  for (Py_ssize_t i = 0, count = PySequence_Size(list); ok && i < count; ++i) {
    PyObject* item = PySequence_GetItem(list, i);
    PyObject* path = nullptr;
    int must_be_loaded = 0;
    ok = item != nullptr && PyArg_ParseTuple(item, "O&p", PyUnicode_FSConverter, &path,
                                             &must_be_loaded);
    if (ok) found.emplace_back(PyBytes_AsString(path), must_be_loaded != 0);
    Py_XDECREF(path);
    Py_XDECREF(item);
  }
  Py_DECREF(list);
  return ok;
}

PyObject* none_if(bool ok) {
  if (!ok) return nullptr;
  Py_RETURN_NONE;
}

PyObject* profiler_initialize(PyObject*, PyObject*) {
  std::vector<Candidate> candidates;
  if (!Capture::instance().is_initialized() && !read_candidates(candidates)) return nullptr;
  return none_if(without_gil([&] {
    if (!Capture::instance().initialize(candidates)) notice("initialize: already initialized");
  }));
}

PyObject* profiler_register(PyObject*, PyObject*) {
  return none_if(without_gil([] { Capture::instance().register_callbacks(); }));
}

PyObject* profiler_start(PyObject*, PyObject*) {
  return none_if(without_gil([] {
    if (!Capture::instance().start()) notice("start: already started");
  }));
}

PyObject* profiler_stop(PyObject*, PyObject*) {
  return none_if(without_gil([] {
    if (!Capture::instance().stop()) notice("stop: not started");
  }));
}

PyObject* profiler_reset(PyObject*, PyObject*) {
  return none_if(without_gil([] { Capture::instance().reset(); }));
}

PyObject* profiler_shutdown(PyObject*, PyObject*) {
  return none_if(without_gil([] { Capture::instance().shutdown(); }));
}

PyObject* profiler_get_stats(PyObject*, PyObject*) {
  std::vector<KernelSummary> summaries;
  if (!without_gil([&] { summaries = Capture::instance().stats(); })) return nullptr;
  PyObject* result = PyDict_New();
  if (result == nullptr) return nullptr;
  auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(stats_type, Py_tp_alloc));
  for (const KernelSummary& summary : summaries) {
    auto* stats = reinterpret_cast<KernelStats*>(alloc(stats_type, 0));
    PyObject* key = PyUnicode_DecodeUTF8(summary.key.data(), summary.key.size(), "replace");
    if (stats == nullptr || key == nullptr) {
      Py_XDECREF(reinterpret_cast<PyObject*>(stats));
      Py_XDECREF(key);
      Py_DECREF(result);
      return nullptr;
    }
    stats->min = summary.min;
    stats->max = summary.max;
    stats->median = summary.median;
    stats->avg = summary.avg;
    stats->stddev = summary.stddev;
    stats->num_calls = static_cast<long long>(summary.num_calls);
    stats->total_calls = static_cast<long long>(summary.total_calls);
    stats->total_time_us = summary.total_time_us;
    const int failed = PyDict_SetItem(result, key, reinterpret_cast<PyObject*>(stats));
    Py_DECREF(reinterpret_cast<PyObject*>(stats));
    Py_DECREF(key);
    if (failed) {
      Py_DECREF(result);
      return nullptr;
    }
  }
  return result;
}

PyObject* get_dropped(PyObject*, void*) {
  return PyLong_FromUnsignedLongLong(Capture::instance().dropped_records());
}
PyObject* get_foreign(PyObject*, void*) {
  return PyLong_FromUnsignedLongLong(Capture::instance().foreign_buffers());
}
PyObject* get_library(PyObject*, void*) {
  std::string path;
  if (!without_gil([&] { path = Capture::instance().library(); })) return nullptr;
  return PyUnicode_DecodeFSDefault(path.c_str());
}
PyObject* get_memory(PyObject*, void*) {
  size_t bytes = 0;
  if (!without_gil([&] { bytes = Capture::instance().memory_bytes(); })) return nullptr;
  return PyLong_FromSize_t(bytes);
}

PyMethodDef profiler_methods[] = {
    {"initialize", profiler_initialize, METH_NOARGS, "Claim CUPTI and register callbacks."},
    {"register_callbacks", profiler_register, METH_NOARGS,
     "Register callbacks again, after another client has replaced them."},
    {"start", profiler_start, METH_NOARGS, "Switch kernel capture on."},
    {"stop", profiler_stop, METH_NOARGS, "Switch kernel capture off."},
    {"get_stats", profiler_get_stats, METH_NOARGS,
     "Return the statistics of each kernel since the last reset, by name and launch shape."},
    {"reset", profiler_reset, METH_NOARGS, "Forget all statistics."},
    {"shutdown", profiler_shutdown, METH_NOARGS, "Release CUPTI."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef profiler_fields[] = {
    {"dropped_records", get_dropped, nullptr, "Records that CUPTI dropped since the reset.",
     nullptr},
    {"foreign_buffers", get_foreign, nullptr, "Buffers that were not ours.", nullptr},
    {"library", get_library, nullptr, "The libcupti in use, empty before initialize.", nullptr},
    {"memory_bytes", get_memory, nullptr, "Memory of the statistics.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot profiler_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(profiler_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(profiler_free)},
    {Py_tp_methods, profiler_methods},
    {Py_tp_getset, profiler_fields},
    {Py_tp_doc, const_cast<char*>("The one profiler of GPU kernels of a process.")},
    {0, nullptr},
};

PyType_Spec profiler_spec = {"nvrx_cupti_module.CuptiProfiler", sizeof(Profiler), 0,
                             Py_TPFLAGS_DEFAULT, profiler_slots};

int add_type(PyObject* module, const char* name, PyObject* type) {
  if (type == nullptr) return -1;
  if (PyModule_AddObjectRef(module, name, type) < 0) {
    Py_DECREF(type);
    return -1;
  }
  return 0;
}

int module_exec(PyObject* module) {
  PyObject* stats = PyType_FromSpec(&stats_spec);
  if (add_type(module, "KernelStats", stats) < 0) return -1;
  stats_type = reinterpret_cast<PyTypeObject*>(stats);  // kept for the life of the process
  PyObject* profiler = PyType_FromSpec(&profiler_spec);
  if (add_type(module, "CuptiProfiler", profiler) < 0) return -1;
  Py_DECREF(profiler);
  return 0;
}

PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(module_exec)},
    {0, nullptr},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "nvrx_cupti_module", "GPU kernel statistics from CUPTI.", 0, nullptr,
    module_slots,          nullptr,             nullptr,                             nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_nvrx_cupti_module() { return PyModuleDef_Init(&module_definition); }
