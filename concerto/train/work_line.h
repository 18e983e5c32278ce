// What a person sees of a command that works for more than a moment: on a terminal one live line, otherwise a plain
// line now and then, always on standard error (or `fd`), so that results stay apart. A quick command shows nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace concerto {

struct WorkLineOptions {
  int fd = 2;
  bool live = false;        // detect_terminal(fd).live
  double first_live = 0.5;  // seconds until the live line appears; then it is drawn every so often
  double first_plain = 3;   // seconds until the first plain line; each next one takes twice as long, a minute at most
  int width = 0;            // of the terminal; 0: ask it
};

// "WHAT: 12 of 340 tensors, 5 s". A thread of its own draws, so that work that cannot count shows at least its time.
class WorkLine {
 public:
  // `what`: "verifying models/mine". `unit`: of set(), "tensors".
  explicit WorkLine(std::string what, std::string unit = "");
  WorkLine(std::string what, std::string unit, const WorkLineOptions& options);
  // Ends it: clears the live line; after plain lines a last one says that it is done, unless an error is on its way.
  ~WorkLine();
  WorkLine(const WorkLine&) = delete;
  WorkLine& operator=(const WorkLine&) = delete;

  // So much is done; cheap, from any thread.
  void set(int64_t done, int64_t total) {
    total_.store(total, std::memory_order_relaxed);
    done_.store(done, std::memory_order_relaxed);
  }

 private:
  void show();
  void draw();
  double seconds() const;

  const std::string what_, unit_;
  const WorkLineOptions options_;
  const double start_;
  const int exceptions_;
  std::atomic<int64_t> done_{0}, total_{0};
  bool drawn_ = false;  // of the drawing thread; then of the destructor
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace concerto
