// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstdlib>
#include <memory>
#include <new>

namespace nvrx {
namespace {

constexpr size_t kAlignment = 64;

std::atomic<Capture*> current{nullptr};

void ignore_callback(void*, int, uint32_t, const void*) {}

template <typename Function>
bool find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

}  // namespace

Capture::Capture() : table_(options_.window, options_.max_kernels) {}

Capture& Capture::instance() {
  static std::once_flag once;
  // Locks may be held by threads that the child does not have, so it begins anew.
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { current = nullptr; }); });
  Capture* found = current;
  if (found == nullptr) {
    auto made = std::unique_ptr<Capture>(new Capture());
    if (current.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

void Capture::configure(const CaptureOptions& options) {
  std::lock_guard<std::mutex> api(api_);
  {
    // Buffers that CUPTI still has keep their size, and so do all others.
    std::lock_guard<std::mutex> lock(pool_);
    options_ = options;
    free_buffers_.reserve(options.buffers);  // giving a buffer back must not need memory
    if (lent_.empty()) {
      for (uint8_t* buffer : free_buffers_) std::free(buffer);
      free_buffers_.clear();
      allocated_ = buffer_size_ = 0;
    }
  }
  std::lock_guard<std::mutex> lock(table_lock_);
  table_ = KernelTable(options.window, options.max_kernels);
}

bool Capture::initialize(const std::vector<Candidate>& candidates) {
  std::lock_guard<std::mutex> api(api_);
  if (is_initialized_) return false;
  load(candidates);
  probe();
  {
    std::lock_guard<std::mutex> lock(pool_);
    if (buffer_size_ == 0) {
      buffer_size_ = (options_.buffer_size + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  check(cupti_.register_callbacks(on_requested, on_completed), "cuptiActivityRegisterCallbacks");
  // Only enabling proves that CUPTI works here: without a driver everything before succeeds.
  check(cupti_.enable(cupti::kConcurrentKernel), "cuptiActivityEnable");
  check(cupti_.disable(cupti::kConcurrentKernel), "cuptiActivityDisable");
  is_initialized_ = true;
  return true;
}

void Capture::load(const std::vector<Candidate>& candidates) {
  if (!library_.empty()) return;
  std::string failures;
  for (const auto& [path, must_be_loaded] : candidates) {
    const int flags = RTLD_NOW | RTLD_LOCAL | (must_be_loaded ? RTLD_NOLOAD : 0);
    void* handle = dlopen(path.c_str(), flags);
    if (handle == nullptr) {
      const char* why = dlerror();
      if (!must_be_loaded && why != nullptr) failures += std::string("; ") + why;
      continue;
    }
    if (resolve(handle)) {
      library_ = path;
      return;
    }
    failures += "; " + path + " lacks functions of CUPTI";
    dlclose(handle);
  }
  throw CaptureError("no usable libcupti was found" + failures +
                     "; set NVRX_CUPTI_LIBRARY to its path");
}

bool Capture::resolve(void* handle) {
  return find(handle, "cuptiActivityRegisterCallbacks", cupti_.register_callbacks) &&
         find(handle, "cuptiActivityEnable", cupti_.enable) &&
         find(handle, "cuptiActivityDisable", cupti_.disable) &&
         find(handle, "cuptiActivityFlushAll", cupti_.flush_all) &&
         find(handle, "cuptiActivityGetNextRecord", cupti_.next_record) &&
         find(handle, "cuptiActivityGetNumDroppedRecords", cupti_.dropped_records) &&
         find(handle, "cuptiGetResultString", cupti_.result_string) &&
         find(handle, "cuptiSubscribe", cupti_.subscribe) &&
         find(handle, "cuptiUnsubscribe", cupti_.unsubscribe);
}

// Refuse to take CUPTI from a debugger or profiler; a subscription would keep torch.profiler out,
// so none is kept.
void Capture::probe() {
  void* subscriber = nullptr;
  const cupti::Result result = cupti_.subscribe(&subscriber, ignore_callback, nullptr);
  if (result == cupti::kMultipleSubscribers) {
    throw CaptureError(
        "another CUPTI client is active in this process (error 39), such as Nsight Systems,"
        " cuda-gdb, compute-sanitizer or a profiler: run without it to time kernels");
  }
  check(result, "cuptiSubscribe");
  check(cupti_.unsubscribe(subscriber), "cuptiUnsubscribe");
}

void Capture::register_callbacks() {
  std::lock_guard<std::mutex> api(api_);
  require_initialized();
  check(cupti_.register_callbacks(on_requested, on_completed), "cuptiActivityRegisterCallbacks");
}

bool Capture::start() {
  std::lock_guard<std::mutex> api(api_);
  require_initialized();
  if (is_started_) return false;
  check(cupti_.enable(cupti::kConcurrentKernel), "cuptiActivityEnable");
  is_started_ = true;
  return true;
}

bool Capture::stop() {
  std::lock_guard<std::mutex> api(api_);
  require_initialized();
  if (!is_started_) return false;
  is_started_ = false;
  check(cupti_.disable(cupti::kConcurrentKernel), "cuptiActivityDisable");
  return true;
}

std::vector<KernelSummary> Capture::stats() {
  TableCopy copy;
  {
    std::lock_guard<std::mutex> api(api_);
    require_initialized();
    check(cupti_.flush_all(cupti::kFlushCompleted), "cuptiActivityFlushAll");
    std::lock_guard<std::mutex> lock(table_lock_);
    copy = table_.copy();
  }
  return copy.summarize();
}

void Capture::reset() {
  std::lock_guard<std::mutex> api(api_);
  require_initialized();
  check(cupti_.flush_all(cupti::kFlushCompleted), "cuptiActivityFlushAll");
  dropped_ = 0;
  std::lock_guard<std::mutex> lock(table_lock_);
  table_.reset();
}

// CUPTI itself is not finalised: that is process-wide and would end torch.profiler's use of it.
void Capture::shutdown() {
  std::lock_guard<std::mutex> api(api_);
  if (!is_initialized_) return;
  is_initialized_ = false;
  const bool was_started = is_started_;
  is_started_ = false;
  const cupti::Result disabled =
      was_started ? cupti_.disable(cupti::kConcurrentKernel) : cupti::kSuccess;
  const cupti::Result flushed = cupti_.flush_all(cupti::kFlushForced);
  dropped_ = 0;
  {
    std::lock_guard<std::mutex> lock(table_lock_);
    table_.reset();
  }
  check(disabled, "cuptiActivityDisable");
  check(flushed, "cuptiActivityFlushAll");
}

std::string Capture::library() const {
  std::lock_guard<std::mutex> api(api_);
  return library_;
}

size_t Capture::memory_bytes() {
  std::lock_guard<std::mutex> lock(table_lock_);
  return table_.memory_bytes();
}

void Capture::require_initialized() const {
  if (!is_initialized_) throw CaptureError("CuptiProfiler is not initialized; call initialize()");
}

void Capture::check(cupti::Result result, const char* call) const {
  if (result == cupti::kSuccess) return;
  const char* text = nullptr;
  if (cupti_.result_string(result, &text) != cupti::kSuccess || text == nullptr) text = "unknown";
  throw CaptureError(std::string(call) + " failed: " + text + " (error " + std::to_string(result) +
                     ")");
}

void Capture::on_requested(uint8_t** buffer, size_t* size, size_t* max_records) noexcept {
  *max_records = 0;
  Capture* capture = current;
  *buffer = capture == nullptr ? nullptr : capture->lend_buffer();
  *size = *buffer == nullptr ? 0 : capture->buffer_size_;
}

void Capture::on_completed(void* context, uint32_t stream, uint8_t* buffer, size_t,
                           size_t valid_size) noexcept {
  Capture* capture = current;
  if (capture == nullptr) return;
  if (!capture->is_ours(buffer)) {
    ++capture->foreign_;
    return;
  }
  capture->read(buffer, valid_size);
  size_t dropped = 0;
  if (capture->cupti_.dropped_records(context, stream, &dropped) == cupti::kSuccess) {
    capture->dropped_ += dropped;
  }
  capture->take_back(buffer);
}

// Null makes CUPTI drop and count records: the pool has a limit, and so has memory.
uint8_t* Capture::lend_buffer() {
  std::lock_guard<std::mutex> lock(pool_);
  uint8_t* buffer = nullptr;
  try {
    if (!free_buffers_.empty()) {
      lent_.insert(free_buffers_.back());
      buffer = free_buffers_.back();
      free_buffers_.pop_back();
    } else if (buffer_size_ != 0 && allocated_ + buffer_size_ <= options_.max_buffer_bytes) {
      buffer = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, buffer_size_));
      if (buffer == nullptr) return nullptr;
      lent_.insert(buffer);
      allocated_ += buffer_size_;
    }
  } catch (const std::bad_alloc&) {
    std::free(buffer);
    buffer = nullptr;
  }
  return buffer;
}

bool Capture::is_ours(uint8_t* buffer) {
  std::lock_guard<std::mutex> lock(pool_);
  return lent_.count(buffer) != 0;
}

void Capture::take_back(uint8_t* buffer) {
  std::lock_guard<std::mutex> lock(pool_);
  lent_.erase(buffer);
  if (free_buffers_.size() < options_.buffers) {
    free_buffers_.push_back(buffer);
  } else {
    allocated_ -= buffer_size_;
    std::free(buffer);
  }
}

void Capture::read(uint8_t* buffer, size_t valid_size) {
  if (valid_size > buffer_size_) return;
  const uint8_t* end = buffer + valid_size;
  cupti::Record* record = nullptr;
  std::lock_guard<std::mutex> lock(table_lock_);
  while (cupti_.next_record(buffer, valid_size, &record) == cupti::kSuccess) {
    const auto* at = reinterpret_cast<const uint8_t*>(record);
    if (at < buffer || at + sizeof(cupti::Record) > end) return;
    if (record->kind != cupti::kConcurrentKernel) continue;
    if (at + sizeof(cupti::KernelRecord) > end) return;
    const auto* kernel = reinterpret_cast<const cupti::KernelRecord*>(record);
    if (kernel->start == 0 || kernel->end < kernel->start || kernel->name == nullptr) continue;
    LaunchShape shape;
    for (int i = 0; i < 3; ++i) {
      shape.block[i] = kernel->block[i];
      shape.grid[i] = kernel->grid[i];
    }
    try {
      table_.add(kernel->name, shape, kernel->end - kernel->start);
    } catch (const std::bad_alloc&) {
      ++dropped_;
    }
  }
}

}  // namespace nvrx
