// SPDX-License-Identifier: Apache-2.0
// Kernel capture through CUPTI's activity interface; no Python.
//
// Locks: `api_` serialises our calls into CUPTI and is never taken by a callback. `pool_` and
// `table_lock_` are taken by callbacks, which run in CUPTI's threads; they are never held while
// CUPTI is called, except for reading records of a buffer that CUPTI has handed over.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cupti_abi.h"
#include "kernel_table.h"

namespace nvrx {

struct CaptureError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CaptureOptions {
  size_t buffer_size = 8388608;
  size_t buffers = 8;
  size_t window = 1024;
  size_t max_buffer_bytes = 64u << 20;
  size_t max_kernels = 16384;
};

// A library to try: its path or name, and whether it counts only if it is loaded already.
using Candidate = std::pair<std::string, bool>;

class Capture {
 public:
  // The capture of this process. It is never destroyed: CUPTI may call back until the very end.
  // A forked child makes a new one with its first call.
  static Capture& instance();

  // Set sizes for the next `initialize`.
  void configure(const CaptureOptions& options);
  // Claim CUPTI; false when it was claimed already.
  bool initialize(const std::vector<Candidate>& candidates);
  void register_callbacks();
  bool start();
  bool stop();
  std::vector<KernelSummary> stats();
  void reset();
  void shutdown();

  bool is_initialized() const { return is_initialized_; }
  // Records that CUPTI dropped, or for which there was no memory, since the last reset.
  uint64_t dropped_records() const { return dropped_; }
  uint64_t foreign_buffers() const { return foreign_; }
  std::string library() const;
  size_t memory_bytes();

 private:
  Capture();
  // Callbacks have frames of C above them, which no exception may cross.
  static void on_requested(uint8_t** buffer, size_t* size, size_t* max_records) noexcept;
  static void on_completed(void* context, uint32_t stream, uint8_t* buffer, size_t size,
                           size_t valid_size) noexcept;
  void load(const std::vector<Candidate>& candidates);
  bool resolve(void* handle);
  void probe();
  void require_initialized() const;
  void check(cupti::Result result, const char* call) const;
  uint8_t* lend_buffer();
  bool is_ours(uint8_t* buffer);
  void take_back(uint8_t* buffer);
  void read(uint8_t* buffer, size_t valid_size);

  mutable std::mutex api_;
  std::mutex pool_;
  std::mutex table_lock_;
  CaptureOptions options_;
  cupti::Functions cupti_{};
  std::string library_;
  std::atomic<bool> is_initialized_{false};
  bool is_started_ = false;
  size_t buffer_size_ = 0;                // of all buffers of the pool, fixed at the first use
  std::vector<uint8_t*> free_buffers_;    // under pool_
  std::unordered_set<uint8_t*> lent_;     // under pool_
  size_t allocated_ = 0;                  // under pool_
  KernelTable table_;                     // under table_lock_
  std::atomic<uint64_t> dropped_{0}, foreign_{0};
};

}  // namespace nvrx
