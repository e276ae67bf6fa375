// SPDX-License-Identifier: Apache-2.0
// Everything at once, for the sanitizers: launches, starts and stops, statistics and resets from
// several threads, with `fake_cupti` linked in. Prints "done" and the number of kernels seen.
#include <cstdio>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "../../cpp/capture.h"

extern "C" {
int fake_run(int, int, int, int64_t, int64_t);
void fake_foreign();
void fake_truncated();
}

int main(int argc, char** argv) {
  using nvrx::Capture;
  Capture& capture = Capture::instance();
  nvrx::CaptureOptions options;
  options.buffer_size = 1 << 14;
  options.window = 100;
  options.max_kernels = 300;
  capture.configure(options);
  capture.initialize({{argc > 1 ? argv[1] : "", false}});
  std::atomic<bool> ended{false};
  std::atomic<size_t> seen{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 2; ++number) {
    threads.emplace_back([&] {
      while (!ended) {
        capture.start();
        capture.stop();
      }
    });
    threads.emplace_back([&] {
      while (!ended) {
        seen += capture.stats().size();
        capture.reset();
      }
    });
  }
  capture.start();
  for (int round = 0; round < 200; ++round) {
    capture.start();
    fake_run(round % 7, 50 + round, 300, 1000, 1);
    fake_foreign();
    fake_truncated();
  }
  capture.start();
  ended = true;
  for (auto& thread : threads) thread.join();
  const pid_t child = fork();
  if (child == 0) _exit(Capture::instance().is_initialized() ? 1 : 0);
  int status = 1;
  waitpid(child, &status, 0);
  capture.shutdown();
  fake_run(0, 5, 100, 1000, 1);  // late callbacks find valid state
  std::printf("%s %zu\n", status == 0 ? "done" : "the child inherited the state", seen.load());
  return status == 0 && seen > 0 ? 0 : 1;
}
