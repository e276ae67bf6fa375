// SPDX-License-Identifier: Apache-2.0
// Compiles only where our declaration of CUPTI fits the real headers of this CUDA version.
#include <cupti.h>

#include <type_traits>

#include "../../cpp/cupti_abi.h"

namespace ours = nvrx::cupti;

#define SAME(field, theirs)                                                                  \
  static_assert(offsetof(ours::KernelRecord, field) == offsetof(NVRX_RECORD, theirs), #field); \
  static_assert(sizeof(ours::KernelRecord::field) == sizeof(NVRX_RECORD::theirs), #field)

SAME(kind, kind);
SAME(start, start);
SAME(end, end);
SAME(completed, completed);
SAME(device_id, deviceId);
SAME(context_id, contextId);
SAME(stream_id, streamId);
SAME(static_shared_memory, staticSharedMemory);
SAME(dynamic_shared_memory, dynamicSharedMemory);
SAME(correlation_id, correlationId);
SAME(grid_id, gridId);
SAME(name, name);
static_assert(offsetof(ours::KernelRecord, grid) == offsetof(NVRX_RECORD, gridX));
static_assert(offsetof(NVRX_RECORD, gridZ) - offsetof(NVRX_RECORD, gridX) == 8);
static_assert(offsetof(ours::KernelRecord, block) == offsetof(NVRX_RECORD, blockX));
static_assert(offsetof(NVRX_RECORD, blockZ) - offsetof(NVRX_RECORD, blockX) == 8);
static_assert(sizeof(NVRX_RECORD) >= sizeof(ours::KernelRecord));

static_assert(ours::kConcurrentKernel == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
static_assert(ours::kSuccess == CUPTI_SUCCESS);
static_assert(ours::kEndOfBuffer == CUPTI_ERROR_MAX_LIMIT_REACHED);
static_assert(ours::kMultipleSubscribers == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
static_assert(ours::kFlushForced == CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
static_assert(std::is_same_v<CUpti_BuffersCallbackRequestFunc, ours::BufferRequested>);

// Enumerations and handles of CUPTI are passed as plain numbers and pointers.
static_assert(sizeof(CUptiResult) == sizeof(ours::Result));
static_assert(sizeof(CUpti_ActivityKind) == sizeof(int32_t));
static_assert(sizeof(CUpti_SubscriberHandle) == sizeof(void*));

int main() { return 0; }
