// SPDX-License-Identifier: Apache-2.0
// The part of CUPTI's interface that is used, declared here so that no CUDA header is needed. The
// layout is that of kernel records from version 4 (CUDA 9) to 13 (CUDA 13); a CI job compares it
// with the real headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvrx::cupti {

using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kEndOfBuffer = 12;  // CUPTI_ERROR_MAX_LIMIT_REACHED
constexpr Result kMultipleSubscribers = 39;

constexpr int32_t kConcurrentKernel = 10;  // CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
constexpr uint32_t kFlushCompleted = 0, kFlushForced = 1;

struct Record {
  int32_t kind;
};

struct KernelRecord {
  int32_t kind;
  uint8_t unused_a[12];
  uint64_t start, end, completed;
  uint32_t device_id, context_id, stream_id;
  int32_t grid[3], block[3];
  int32_t static_shared_memory, dynamic_shared_memory;
  uint32_t unused_b[2];
  uint32_t correlation_id;
  int64_t grid_id;
  const char* name;
};

static_assert(offsetof(KernelRecord, start) == 16);
static_assert(offsetof(KernelRecord, end) == 24);
static_assert(offsetof(KernelRecord, completed) == 32);
static_assert(offsetof(KernelRecord, device_id) == 40);
static_assert(offsetof(KernelRecord, grid) == 52);
static_assert(offsetof(KernelRecord, block) == 64);
static_assert(offsetof(KernelRecord, static_shared_memory) == 76);
static_assert(offsetof(KernelRecord, correlation_id) == 92);
static_assert(offsetof(KernelRecord, grid_id) == 96);
static_assert(offsetof(KernelRecord, name) == 104);
static_assert(sizeof(KernelRecord) == 112);

using BufferRequested = void (*)(uint8_t** buffer, size_t* size, size_t* max_records);
using BufferCompleted = void (*)(void* context, uint32_t stream, uint8_t* buffer, size_t size,
                                 size_t valid_size);

struct Functions {
  Result (*register_callbacks)(BufferRequested, BufferCompleted);
  Result (*enable)(int32_t kind);
  Result (*disable)(int32_t kind);
  Result (*flush_all)(uint32_t flag);
  Result (*next_record)(uint8_t* buffer, size_t valid_size, Record** record);
  Result (*dropped_records)(void* context, uint32_t stream, size_t* dropped);
  Result (*result_string)(Result result, const char** text);
  Result (*subscribe)(void** subscriber, void (*callback)(void*, int, uint32_t, const void*),
                      void* user_data);
  Result (*unsubscribe)(void* subscriber);
};

}  // namespace nvrx::cupti
