#include "concerto/train/trace_writer.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "concerto/base/error.h"
#include "concerto/base/files.h"

namespace concerto {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::atomic<uint64_t> next_writer_id{1};
struct ThreadSlot {
  uint64_t writer = 0;
  int32_t thread = 0;
};
thread_local ThreadSlot slot;

template <size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  size_t n = std::min(from.size(), N - 1);
  while (n < from.size() && n > 0 && (static_cast<uint8_t>(from[n]) & 0xc0) == 0x80)
    --n;  // not inside a UTF-8 character
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

void append_quoted(std::string& out, std::string_view text) {
  out.push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') out.push_back('\\');
    if (static_cast<uint8_t>(c) < 0x20)
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(c));
    else
      out.push_back(c);
  }
  out.push_back('"');
}

}  // namespace

TraceWriter::TraceWriter(std::string path, int64_t first_step, int64_t last_step, int64_t capacity, Warn warn)
    : path_(std::move(path)),
      first_step_(first_step),
      last_step_(last_step),
      warn_(std::move(warn)),
      id_(next_writer_id.fetch_add(1)),
      capacity_(capacity),
      thread_names_(kMaxThreads) {
  CHECK(first_step <= last_step && capacity > 0, "steps {}..{}, capacity {}", first_step, last_step, capacity);
  records_ = std::make_unique_for_overwrite<Record[]>(static_cast<size_t>(capacity));
}

int32_t TraceWriter::this_thread() {
  if (slot.writer == id_) return slot.thread;
  const int32_t thread = std::min(threads_.fetch_add(1), kMaxThreads - 1);  // the last number is shared by all above it
  slot = {id_, thread};
  ::prctl(PR_GET_NAME, thread_names_[static_cast<size_t>(thread)].text);  // at most 16 bytes
  return thread;
}

void TraceWriter::name_thread(std::string_view name) {
  copy_text(thread_names_[static_cast<size_t>(this_thread())].text, name);
}

void TraceWriter::begin_step(int64_t step) {
  step_ = step;
  if (written_ || step < first_step_ || step > last_step_) return;
  if (used_.load() == 0) start_ns_ = now_ns();
  active_.store(true, std::memory_order_release);
  char name[32];
  const auto end = fmt::format_to_n(name, sizeof(name), "step {}", step);
  step_record_ = begin({name, end.size}, "step");
}

void TraceWriter::end_step() {
  if (!active()) return;
  end(step_record_);
  active_.store(false, std::memory_order_release);
  if (step_ >= last_step_) finish();
}

int64_t TraceWriter::begin(std::string_view name, std::string_view category, int64_t layer, int64_t micro_batch) {
  if (!active()) return -1;
  const int64_t handle = used_.fetch_add(1, std::memory_order_relaxed);
  if (handle >= capacity_) return -1;
  Record& r = records_[static_cast<size_t>(handle)];
  r.end_ns = 0;
  r.step = step_;
  r.layer = layer;
  r.micro_batch = micro_batch;
  r.thread = this_thread();
  copy_text(r.name, name);
  copy_text(r.category, category);
  r.begin_ns = now_ns();
  return handle;
}

void TraceWriter::end(int64_t handle) {
  if (handle >= 0) records_[static_cast<size_t>(handle)].end_ns = now_ns();
}

void TraceWriter::finish() {
  active_.store(false);
  if (written_ || used_.load() == 0) return;
  written_ = true;
  try {
    write_file_atomic(path_, json());
  } catch (const Error& error) {
    if (warn_) warn_(error.what());
  }
}

std::string TraceWriter::json() const {
  const int64_t wanted = used_.load(), kept = std::min(wanted, capacity_);
  std::string out;
  const auto add = [&out]<class... A>(fmt::format_string<A...> format, A&&... a) {
    fmt::format_to(std::back_inserter(out), format, std::forward<A>(a)...);
  };
  const int pid = static_cast<int>(::getpid());
  add("{{\"displayTimeUnit\": \"ms\", \"otherData\": {{\"records\": {}, \"dropped\": {}}}, \"traceEvents\": [\n", kept,
      wanted - kept);
  add("{{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": {}, \"args\": {{\"name\": \"concerto\"}}}}", pid);
  for (int32_t t = 0; t < std::min(threads_.load(), kMaxThreads); ++t) {
    add(",\n{{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": {}, \"tid\": {}, \"args\": {{\"name\": ", pid, t);
    append_quoted(out, thread_names_[static_cast<size_t>(t)].text);
    out += "}}";
    add(",\n{{\"ph\": \"M\", \"name\": \"thread_sort_index\", \"pid\": {}, \"tid\": {}, \"args\": {{\"sort_index\": "
        "{}}}}}",
        pid, t, t);
  }
  for (int64_t i = 0; i < kept; ++i) {
    const Record& r = records_[static_cast<size_t>(i)];
    if (r.end_ns == 0) continue;  // still open when the run stopped
    add(",\n{{\"ph\": \"X\", \"pid\": {}, \"tid\": {}, \"ts\": {:.3f}, \"dur\": {:.3f}, \"name\": ", pid, r.thread,
        static_cast<double>(r.begin_ns - start_ns_) * 1e-3, static_cast<double>(r.end_ns - r.begin_ns) * 1e-3);
    append_quoted(out, r.name);
    out += ", \"cat\": ";
    append_quoted(out, r.category);
    add(", \"args\": {{\"step\": {}", r.step);
    if (r.layer >= 0) add(", \"layer\": {}", r.layer);
    if (r.micro_batch >= 0) add(", \"micro_batch\": {}", r.micro_batch);
    out += "}}";
  }
  out += "\n]}\n";
  return out;
}

}  // namespace concerto
