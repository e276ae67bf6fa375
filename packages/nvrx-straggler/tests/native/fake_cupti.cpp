// SPDX-License-Identifier: Apache-2.0
// A libcupti for tests: the functions that the extension uses, and `fake_*` to steer them.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Requested = void (*)(uint8_t**, size_t*, size_t*);
using Completed = void (*)(void*, uint32_t, uint8_t*, size_t, size_t);

struct State {
  std::mutex lock;  // never held while a callback runs
  Requested requested = nullptr;
  Completed completed = nullptr;
  bool enabled = false;
  uint8_t* buffer = nullptr;
  size_t size = 0, used = 0;
  size_t record_size = 208;
  size_t dropped = 0;
  int flush_ms = 0, switch_ms = 0, flushes = 0, forced = 0;
  std::map<std::string, int> errors;
  std::deque<std::string> names;
  std::deque<uint8_t*> held;
};

State& state() {
  static State* instance = new State;
  return *instance;
}

int error_of(const char* call) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  auto found = s.errors.find(call);
  return found == s.errors.end() ? 0 : found->second;
}

void deliver() {
  State& s = state();
  uint8_t* buffer;
  size_t size, used;
  Completed completed;
  {
    std::lock_guard<std::mutex> guard(s.lock);
    buffer = s.buffer, size = s.size, used = s.used, completed = s.completed;
    s.buffer = nullptr;
    s.used = 0;
  }
  if (buffer == nullptr || completed == nullptr) return;
  // As CUPTI does, from a thread of its own.
  std::thread(completed, nullptr, 0, buffer, size, used).join();
}

char* name_of(size_t kernel) {
  State& s = state();
  while (s.names.size() <= kernel) {
    std::string text = "void cutlass::Kernel_" + std::to_string(s.names.size()) + "_";
    text.resize(180, 'x');
    s.names.push_back(text);
  }
  return s.names[kernel].data();
}

void write_record(uint8_t* at, size_t kernel, uint64_t start, uint64_t end, size_t size) {
  std::memset(at, 0xcd, size);
  const int32_t kind = 10, grid[3] = {static_cast<int32_t>(kernel) + 1, 1, 1}, block[3] = {256, 1, 1};
  char* name = name_of(kernel);
  std::memcpy(at, &kind, 4);
  std::memcpy(at + 16, &start, 8);
  std::memcpy(at + 24, &end, 8);
  std::memcpy(at + 52, grid, 12);
  std::memcpy(at + 64, block, 12);
  std::memcpy(at + 104, &name, 8);
}

}  // namespace

EXPORT int cuptiActivityRegisterCallbacks(Requested requested, Completed completed) {
  if (int error = error_of("register")) return error;
  State& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  s.requested = requested;
  s.completed = completed;
  return 0;
}

EXPORT int cuptiActivityEnable(int32_t) {
  if (int error = error_of("enable")) return error;
  std::this_thread::sleep_for(std::chrono::milliseconds(state().switch_ms));
  std::lock_guard<std::mutex> guard(state().lock);
  state().enabled = true;
  return 0;
}

EXPORT int cuptiActivityDisable(int32_t) {
  if (int error = error_of("disable")) return error;
  std::this_thread::sleep_for(std::chrono::milliseconds(state().switch_ms));
  std::lock_guard<std::mutex> guard(state().lock);
  state().enabled = false;
  return 0;
}

EXPORT int cuptiActivityFlushAll(uint32_t flag) {
  int wait_ms;
  {
    std::lock_guard<std::mutex> guard(state().lock);
    wait_ms = state().flush_ms;
    ++state().flushes;
    state().forced += flag == 1;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
  if (int error = error_of("flush")) return error;
  deliver();
  return 0;
}

EXPORT int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, void** record) {
  const size_t size = state().record_size;
  uint8_t* next = *record == nullptr ? buffer : static_cast<uint8_t*>(*record) + size;
  if (next >= buffer + valid) return 12;
  *record = next;
  return 0;
}

EXPORT int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* dropped) {
  std::lock_guard<std::mutex> guard(state().lock);
  *dropped = state().dropped;
  state().dropped = 0;
  return 0;
}

EXPORT int cuptiGetResultString(int result, const char** text) {
  *text = result == 15 ? "CUPTI_ERROR_NOT_INITIALIZED" : "CUPTI_ERROR_OF_THE_FAKE";
  return 0;
}

EXPORT int cuptiSubscribe(void** subscriber, void (*)(void*, int, uint32_t, const void*), void*) {
  if (int error = error_of("subscribe")) return error;
  *subscriber = subscriber;
  return 0;
}

EXPORT int cuptiUnsubscribe(void*) { return 0; }

// --- for tests ---

EXPORT void fake_reset() {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  s.errors.clear();
  s.flush_ms = s.switch_ms = s.flushes = s.forced = 0;
  s.dropped = 0;
  s.record_size = 208;
}
EXPORT void fake_error(const char* call, int code) {
  std::lock_guard<std::mutex> guard(state().lock);
  state().errors[call] = code;
}
EXPORT void fake_flush_ms(int ms) { state().flush_ms = ms; }
EXPORT void fake_switch_ms(int ms) { state().switch_ms = ms; }
EXPORT void fake_dropped(int count) { state().dropped = count; }
EXPORT int fake_is_enabled() {
  std::lock_guard<std::mutex> guard(state().lock);
  return state().enabled;
}
EXPORT int fake_forced_flushes() { return state().forced; }
EXPORT int fake_has_callbacks() { return state().completed != nullptr; }
EXPORT void fake_record_size(int size) { state().record_size = size; }
EXPORT void fake_callbacks(Requested* requested, Completed* completed) {
  *requested = state().requested;
  *completed = state().completed;
}
// Another client takes CUPTI over.
EXPORT void fake_steal() {
  state().requested = nullptr;
  state().completed = nullptr;
}
// The module of a kernel is unloaded and another one lies at the same address.
EXPORT void fake_rename(int kernel, const char* text) {
  char* name = name_of(kernel);
  std::strncpy(name, text, 180);
}

static bool has_buffer() {
  State& s = state();
  bool is_full;
  Requested requested;
  {
    std::lock_guard<std::mutex> guard(s.lock);
    if (!s.enabled) return false;
    is_full = s.buffer != nullptr && s.used + s.record_size > s.size;
    if (s.buffer != nullptr && !is_full) return true;
    requested = s.requested;
  }
  if (is_full) deliver();
  uint8_t* buffer = nullptr;
  size_t size = 0, most = 0;
  if (requested != nullptr) requested(&buffer, &size, &most);
  std::lock_guard<std::mutex> guard(s.lock);
  s.buffer = buffer, s.size = size, s.used = 0;
  return buffer != nullptr;
}

// Run kernels: record i is of kernel `first + i % kernels` and takes `duration_ns + i * step_ns`.
// Returns how many were recorded; the others found no buffer and are dropped.
EXPORT int fake_run(int first, int kernels, int records, int64_t duration_ns, int64_t step_ns) {
  State& s = state();
  int written = 0;
  for (int i = 0; i < records; ++i) {
    if (!has_buffer()) {
      if (!fake_is_enabled()) return written;
      std::lock_guard<std::mutex> guard(s.lock);
      ++s.dropped;
      continue;
    }
    const uint64_t duration = duration_ns + i * step_ns;
    const uint64_t start = duration_ns == -1 ? 0 : 1000;
    std::lock_guard<std::mutex> guard(s.lock);
    if (s.buffer == nullptr) continue;  // a flush came first
    write_record(s.buffer + s.used, first + i % kernels, start, 1000 + duration, s.record_size);
    s.used += s.record_size;
    ++written;
  }
  return written;
}

// Hand over a buffer that the extension has never seen.
EXPORT void fake_foreign() {
  static uint8_t buffer[4096];
  if (state().completed != nullptr) state().completed(nullptr, 0, buffer, 4096, 4096);
}
// Hold on to requested buffers, so that the pool runs dry; returns how many were given.
EXPORT int fake_exhaust(int most) {
  int count = 0;
  for (; count < most; ++count) {
    uint8_t* buffer = nullptr;
    size_t size = 0, records = 0;
    state().requested(&buffer, &size, &records);
    if (buffer == nullptr) break;
    state().held.push_back(buffer);
  }
  return count;
}
EXPORT void fake_release() {
  for (uint8_t* buffer : state().held) state().completed(nullptr, 0, buffer, 0, 0);
  state().held.clear();
}
// Deliver a buffer whose last record is cut.
EXPORT void fake_truncated() {
  State& s = state();
  uint8_t* buffer = nullptr;
  size_t size = 0, records = 0;
  s.requested(&buffer, &size, &records);
  if (buffer == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(s.lock);
    write_record(buffer, 0, 1000, 3000, s.record_size);
  }
  std::memset(buffer + s.record_size, 10, 4);
  const int32_t kind = 10;
  std::memcpy(buffer + s.record_size, &kind, 4);
  s.completed(nullptr, 0, buffer, size, s.record_size + 40);
}
static double cpu_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1e9 + now.tv_nsec;
}
// Nanoseconds of processor time per record of the completion callback, over `rounds` full buffers.
EXPORT double fake_cost_ns(int kernels, int rounds) {
  State& s = state();
  double spent = 0;
  int64_t records = 0, kernel = 0;
  for (int round = 0; round < rounds; ++round) {
    uint8_t* buffer = nullptr;
    size_t size = 0, most = 0;
    s.requested(&buffer, &size, &most);
    const size_t count = size / s.record_size;
    for (size_t i = 0; i < count; ++i, ++kernel) {
      const int64_t number = (kernel * 7919) % kernels;
      write_record(buffer + i * s.record_size, number, 1000, 2000 + kernel % 997, s.record_size);
    }
    const double begin = cpu_ns();
    s.completed(nullptr, 0, buffer, size, count * s.record_size);
    spent += cpu_ns() - begin;
    records += static_cast<int64_t>(count);
  }
  return spent / static_cast<double>(records);
}
