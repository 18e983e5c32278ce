// A timeline of a few training steps in the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing
// open.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/train/record_file.h"

namespace concerto {

// Records are kept in memory of a fixed size and written as one file after the last traced step: recording neither
// allocates nor locks. begin(), end() and name_thread() may be called from any thread; begin_step(), end_step() and
// finish() from one, with no record open.
class TraceWriter {
 public:
  static constexpr int64_t kDefaultCapacity = 1 << 17;

  // Records steps first_step..last_step (inclusive) into `path`, at most `capacity` records; what does not fit is
  // counted and left out.
  TraceWriter(std::string path, int64_t first_step, int64_t last_step, int64_t capacity = kDefaultCapacity,
              Warn warn = warn_on_stderr);

  void name_thread(std::string_view name);  // of the calling thread; else its name in the system
  void begin_step(int64_t step);            // recording is on from here if the step is a traced one
  void end_step();                          // after the last traced step the file is written
  void finish();                            // writes what is there, if the run ends before the last traced step

  bool active() const { return active_.load(std::memory_order_relaxed); }
  // Starts a span on the calling thread; -1 leaves an argument out. Longer texts are cut to 47 and 15 bytes. Returns
  // the handle for end(), or -1.
  int64_t begin(std::string_view name, std::string_view category, int64_t layer = -1, int64_t micro_batch = -1);
  void end(int64_t handle);

 private:
  struct Record {  // trivial, so that memory which no record reaches is never touched
    int64_t begin_ns, end_ns;
    int64_t step, layer, micro_batch;
    int32_t thread;
    char name[48], category[16];
  };
  struct ThreadName {
    char text[32] = {};
  };
  static constexpr int32_t kMaxThreads = 1024;

  int32_t this_thread();
  std::string json() const;

  const std::string path_;
  const int64_t first_step_, last_step_;
  const Warn warn_;
  const uint64_t id_;  // of this writer, so that a thread knows which writer its number belongs to
  const int64_t capacity_;
  std::unique_ptr<Record[]> records_;
  std::atomic<int64_t> used_{0};
  std::vector<ThreadName> thread_names_;
  std::atomic<int32_t> threads_{0};
  std::atomic<bool> active_{false};
  int64_t step_ = 0, step_record_ = -1, start_ns_ = 0;
  bool written_ = false;
};

// Records its own lifetime. Costs one branch with a null or inactive writer.
class TraceScope {
 public:
  TraceScope(TraceWriter* writer, std::string_view name, std::string_view category, int64_t layer = -1,
             int64_t micro_batch = -1) {
    if (writer != nullptr && writer->active()) {
      handle_ = writer->begin(name, category, layer, micro_batch);
      writer_ = writer;
    }
  }
  ~TraceScope() {
    if (writer_ != nullptr) writer_->end(handle_);
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceWriter* writer_ = nullptr;
  int64_t handle_ = -1;
};

}  // namespace concerto
