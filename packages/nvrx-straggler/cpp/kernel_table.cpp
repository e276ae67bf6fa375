// SPDX-License-Identifier: Apache-2.0
#include "kernel_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nvrx {
namespace {

constexpr size_t kFirstSlots = 1024;

uint64_t mix(uint64_t value) {
  value ^= value >> 32;
  value *= 0x9e3779b97f4a7c15ull;
  value ^= value >> 29;
  return value;
}

uint64_t hash_shape(const LaunchShape& shape) {
  uint64_t words[3];
  std::memcpy(words, &shape, sizeof words);
  return mix(words[0] ^ mix(words[1] ^ mix(words[2])));
}

uint64_t hash_text(const char* text, size_t length) {
  uint64_t hash = length;
  for (; length >= 8; text += 8, length -= 8) {
    uint64_t word;
    std::memcpy(&word, text, 8);
    hash = mix(hash ^ word);
  }
  uint64_t rest = 0;
  std::memcpy(&rest, text, length);
  return mix(hash ^ rest);
}

}  // namespace

bool LaunchShape::operator==(const LaunchShape& other) const {
  return std::memcmp(this, &other, sizeof other) == 0;
}

KernelTable::KernelTable(size_t window, size_t max_kernels)
    : window_(std::max<size_t>(window, 1)),
      max_kernels_(std::max<size_t>(max_kernels, 1)),
      cache_(kCacheSlots, CacheSlot{nullptr, kNone}) {
  rebuild_index(kFirstSlots);
}

void KernelTable::add(const char* name, const LaunchShape& shape, uint64_t duration_ns) {
  const uint64_t place = mix(reinterpret_cast<uintptr_t>(name) ^ hash_shape(shape));
  CacheSlot& slot = cache_[place & (kCacheSlots - 1)];
  uint32_t number = slot.entry;
  const bool is_hit = slot.name == name && number != kNone && entries_[number].shape == shape &&
                      entries_[number].name == name;
  if (!is_hit) {
    number = find_or_insert(name, shape);
    if (number == kNone) {
      ++untracked_;
      return;
    }
    slot = {name, number};
  }
  Entry& entry = entries_[number];
  ++entry.total_calls;
  entry.total_ns += duration_ns;
  append(entry, static_cast<float>(duration_ns));
}

uint32_t KernelTable::find_or_insert(const char* name, const LaunchShape& shape) {
  const size_t length = std::strlen(name);
  const uint64_t hash = mix(hash_text(name, length) ^ hash_shape(shape));
  const size_t mask = index_.size() - 1;
  for (size_t slot = hash & mask; index_[slot] != kNone; slot = (slot + 1) & mask) {
    const Entry& entry = entries_[index_[slot]];
    if (entry.hash == hash && entry.shape == shape && entry.name.size() == length &&
        std::memcmp(entry.name.data(), name, length) == 0) {
      return index_[slot];
    }
  }
  return insert(name, length, shape, hash);
}

uint32_t KernelTable::insert(const char* name, size_t length, const LaunchShape& shape,
                             uint64_t hash) {
  if (entries_.size() >= max_kernels_) return kNone;
  // Whatever may fail for lack of memory comes first.
  if ((entries_.size() + 1) * 2 > index_.size()) rebuild_index(index_.size() * 2);
  const auto number = static_cast<uint32_t>(entries_.size());
  entries_.push_back(
      Entry{std::string(name, length), shape, hash, kNone, kNone, 0, 0, 0, 0, 0});
  const size_t mask = index_.size() - 1;
  size_t slot = hash & mask;
  while (index_[slot] != kNone) slot = (slot + 1) & mask;
  index_[slot] = number;
  return number;
}

void KernelTable::rebuild_index(size_t slots) {
  std::vector<uint32_t> index(slots, kNone);
  for (uint32_t number = 0; number < entries_.size(); ++number) {
    size_t slot = entries_[number].hash & (slots - 1);
    while (index[slot] != kNone) slot = (slot + 1) & (slots - 1);
    index[slot] = number;
  }
  index_ = std::move(index);
}

void KernelTable::append(Entry& entry, float duration_ns) {
  if (entry.sample_count < window_) {
    if (entry.first_chunk == kNone || entry.offset == kChunkSamples) {
      const uint32_t fresh = take_chunk();
      if (entry.first_chunk == kNone) {
        entry.first_chunk = fresh;
      } else {
        chunk(entry.current_chunk).next = fresh;
      }
      entry.current_chunk = fresh;
      entry.offset = 0;
    }
    ++entry.sample_count;
    if (entry.sample_count == window_) {  // from the next sample on the oldest is overwritten
      chunk(entry.current_chunk).samples[entry.offset] = duration_ns;
      entry.current_chunk = entry.first_chunk;
      entry.offset = 0;
      return;
    }
  } else if (entry.offset == kChunkSamples) {
    entry.current_chunk = chunk(entry.current_chunk).next;
    entry.offset = 0;
  }
  chunk(entry.current_chunk).samples[entry.offset++] = duration_ns;
  // The last chunk may be partly used: wrap after the sample that fills the window.
  if (entry.sample_count == window_ && chunk(entry.current_chunk).next == kNone &&
      entry.offset == (window_ - 1) % kChunkSamples + 1) {
    entry.current_chunk = entry.first_chunk;
    entry.offset = 0;
  }
}

uint32_t KernelTable::take_chunk() {
  const uint32_t number = used_chunks_;
  if (number / kPageChunks == pages_.size()) {
    pages_.push_back(std::unique_ptr<Chunk[]>(new Chunk[kPageChunks]));
  }
  ++used_chunks_;
  chunk(number).next = kNone;
  return number;
}

TableCopy KernelTable::copy() const {
  TableCopy result;
  size_t samples = 0, items = 0;
  for (const Entry& entry : entries_) {
    samples += entry.sample_count;
    items += entry.sample_count != 0;
  }
  result.samples_.reserve(samples);
  result.items_.reserve(items);
  for (const Entry& entry : entries_) {
    if (entry.sample_count == 0) continue;
    result.items_.push_back({entry.name, entry.shape, result.samples_.size(), entry.sample_count,
                             entry.total_calls, entry.total_ns});
    size_t left = entry.sample_count;
    for (uint32_t number = entry.first_chunk; left != 0; number = chunk(number).next) {
      const size_t take = std::min(left, kChunkSamples);
      const float* from = chunk(number).samples;
      result.samples_.insert(result.samples_.end(), from, from + take);
      left -= take;
    }
  }
  return result;
}

void KernelTable::reset() {
  bool has_idle = false;
  for (Entry& entry : entries_) {
    entry.idle_windows = entry.sample_count == 0 ? entry.idle_windows + 1 : 0;
    has_idle |= entry.idle_windows >= kIdleWindows;
    entry.first_chunk = entry.current_chunk = kNone;
    entry.offset = entry.sample_count = 0;
    entry.total_calls = entry.total_ns = 0;
  }
  used_chunks_ = 0;
  untracked_ = 0;
  if (has_idle) {
    const auto is_idle = [](const Entry& e) { return e.idle_windows >= kIdleWindows; };
    entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_idle), entries_.end());
    entries_.shrink_to_fit();
    size_t slots = kFirstSlots;
    while (slots < entries_.size() * 2) slots *= 2;
    rebuild_index(slots);
    cache_.assign(kCacheSlots, CacheSlot{nullptr, kNone});
  }
}

size_t KernelTable::memory_bytes() const {
  size_t names = 0;
  for (const Entry& entry : entries_) names += entry.name.capacity() + 1;
  return names + entries_.capacity() * sizeof(Entry) + index_.capacity() * sizeof(uint32_t) +
         cache_.capacity() * sizeof(CacheSlot) + pages_.size() * kPageChunks * sizeof(Chunk);
}

std::vector<KernelSummary> TableCopy::summarize() {
  std::vector<KernelSummary> result;
  result.reserve(items_.size());
  for (const Item& item : items_) {
    float* first = samples_.data() + item.first_sample;
    const size_t count = item.sample_count;
    const auto extremes = std::minmax_element(first, first + count);
    const double least = *extremes.first, greatest = *extremes.second;
    double sum = 0;
    for (size_t i = 0; i < count; ++i) sum += first[i];
    const double mean = sum / static_cast<double>(count);
    double squares = 0;
    for (size_t i = 0; i < count; ++i) squares += (first[i] - mean) * (first[i] - mean);
    std::nth_element(first, first + count / 2, first + count);
    double median = first[count / 2];
    if (count % 2 == 0) median = (median + *std::max_element(first, first + count / 2)) / 2;
    const int32_t* b = item.shape.block;
    const int32_t* g = item.shape.grid;
    std::string key = item.name + "_blk";
    for (int i = 0; i < 3; ++i) key += "_" + std::to_string(b[i]);
    key += "_grid";
    for (int i = 0; i < 3; ++i) key += "_" + std::to_string(g[i]);
    result.push_back({std::move(key), least / 1e3, greatest / 1e3, median / 1e3, mean / 1e3,
                      std::sqrt(squares / static_cast<double>(count)) / 1e3, count,
                      item.total_calls, static_cast<double>(item.total_ns) / 1e3});
  }
  return result;
}

}  // namespace nvrx
