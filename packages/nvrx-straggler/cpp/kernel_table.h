// SPDX-License-Identifier: Apache-2.0
// Durations of kernels: a bounded window of samples and running totals for each kernel. No CUPTI,
// no Python and no locks: callers serialise access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace nvrx {

// Block and grid size of a launch; with the name they identify a kernel.
struct LaunchShape {
  int32_t block[3];
  int32_t grid[3];
  bool operator==(const LaunchShape& other) const;
};

// Statistics of one kernel, times in microseconds.
struct KernelSummary {
  std::string key;
  double min, max, median, avg, stddev;
  uint64_t num_calls;    // samples in the window
  uint64_t total_calls;  // calls since the last reset
  double total_time_us;  // their durations
};

// The samples of all kernels, copied so that statistics are computed without holding a lock.
class TableCopy {
 public:
  std::vector<KernelSummary> summarize();

 private:
  friend class KernelTable;
  struct Item {
    std::string name;
    LaunchShape shape;
    size_t first_sample, sample_count;
    uint64_t total_calls, total_ns;
  };
  std::vector<Item> items_;
  std::vector<float> samples_;
};

class KernelTable {
 public:
  // `window`: newest samples kept per kernel; `max_kernels`: kernels kept in all.
  KernelTable(size_t window, size_t max_kernels);

  // Add one duration. The name is copied at first sight: the pointer may die with its module.
  // Throws bad_alloc; the table then lacks this duration and is otherwise whole.
  void add(const char* name, const LaunchShape& shape, uint64_t duration_ns);
  TableCopy copy() const;
  // Forget all samples. Kernels that were not seen for several windows are forgotten, too.
  void reset();
  // Records of kernels for which there was no place.
  uint64_t untracked_records() const { return untracked_; }
  size_t memory_bytes() const;

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr size_t kChunkSamples = 31;
  static constexpr size_t kPageChunks = 512;
  static constexpr size_t kCacheSlots = 1 << 14;
  static constexpr uint32_t kIdleWindows = 4;

  struct Chunk {
    float samples[kChunkSamples];
    uint32_t next;
  };
  struct Entry {
    std::string name;
    LaunchShape shape;
    uint64_t hash;
    uint32_t first_chunk, current_chunk, offset, sample_count;
    uint32_t idle_windows;
    uint64_t total_calls, total_ns;
  };
  struct CacheSlot {
    const char* name;
    uint32_t entry;
  };

  uint32_t find_or_insert(const char* name, const LaunchShape& shape);
  uint32_t insert(const char* name, size_t length, const LaunchShape& shape, uint64_t hash);
  void rebuild_index(size_t slots);
  void append(Entry& entry, float duration_ns);
  uint32_t take_chunk();
  Chunk& chunk(uint32_t number) const {
    return pages_[number / kPageChunks][number % kPageChunks];
  }

  size_t window_, max_kernels_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> index_;   // open addressing by text and shape
  std::vector<CacheSlot> cache_;  // direct-mapped by name pointer and shape
  std::vector<std::unique_ptr<Chunk[]>> pages_;
  uint32_t used_chunks_ = 0;
  uint64_t untracked_ = 0;
};

}  // namespace nvrx
