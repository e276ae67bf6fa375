// SPDX-License-Identifier: Apache-2.0
// Callbacks of the capture while memory is short: the n-th allocation of a round fails, for each n.
// Prints "done" when nothing was thrown through a callback and every record was counted once.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "../../cpp/capture.h"

using Requested = void (*)(uint8_t**, size_t*, size_t*);
using Completed = void (*)(void*, uint32_t, uint8_t*, size_t, size_t);
extern "C" void fake_callbacks(Requested*, Completed*);

static long allocations_left = -1;  // -1: no limit

void* operator new(size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

int main(int, char** argv) {
  constexpr size_t kStride = 208, kRecords = 100, kRounds = 60;
  nvrx::Capture& capture = nvrx::Capture::instance();
  nvrx::CaptureOptions options;
  options.buffer_size = kStride * kRecords;
  options.window = 1 << 20;
  capture.configure(options);
  capture.initialize({{argv[1], false}});
  Requested requested;
  Completed completed;
  fake_callbacks(&requested, &completed);
  std::vector<std::string> names;
  for (size_t i = 0; i < kRecords * kRounds; ++i) {
    names.push_back("kernel with a name that no short string holds " + std::to_string(i));
  }
  size_t offered = 0;
  for (size_t round = 0; round < 2 * kRounds; ++round) {
    uint8_t* buffer = nullptr;
    size_t size = 0, most = 0;
    allocations_left = round < kRounds ? static_cast<long>(round % 3) : -1;
    requested(&buffer, &size, &most);
    if (buffer == nullptr) continue;
    for (size_t i = 0; i < kRecords; ++i) {
      nvrx::cupti::KernelRecord record{};
      record.kind = nvrx::cupti::kConcurrentKernel;
      record.start = 1000;
      record.end = 2000;
      record.name = names[round % kRounds * kRecords + i].c_str();
      *reinterpret_cast<nvrx::cupti::KernelRecord*>(buffer + i * kStride) = record;
    }
    allocations_left = round < kRounds ? static_cast<long>(round) : -1;
    completed(nullptr, 0, buffer, size, kRecords * kStride);
    offered += kRecords;
  }
  std::map<std::string, uint64_t> calls;
  uint64_t counted = capture.dropped_records();
  const bool has_dropped = counted != 0;
  size_t kernels = 0;
  for (const auto& kernel : capture.stats()) {
    calls[kernel.key] += kernel.num_calls;
    counted += kernel.num_calls;
    ++kernels;
  }
  const bool is_right = has_dropped && counted == offered && kernels == calls.size();
  std::printf("%s: %zu offered, %llu counted, %zu kernels under %zu names\n",
              is_right ? "done" : "wrong", offered, static_cast<unsigned long long>(counted),
              kernels, calls.size());
  return is_right ? 0 : 1;
}
