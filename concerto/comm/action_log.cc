#include "concerto/comm/action_log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "concerto/base/files.h"

namespace concerto {
namespace {

constexpr char kMagic[8] = {'C', 'N', 'C', 'T', 'A', 'C', 'T', '1'};
thread_local ActionLog* current_log = nullptr;

template <size_t kRoom>
void put(char (&to)[kRoom], std::string_view text) {
  const size_t bytes = std::min(text.size(), kRoom - 1);
  std::memcpy(to, text.data(), bytes);
  std::memset(to + bytes, 0, kRoom - bytes);
}

template <size_t kRoom>
std::string get(const char (&from)[kRoom]) {
  return {from, ::strnlen(from, kRoom)};
}

}  // namespace

struct ActionLog::File {
  char magic[8];
  int32_t rank, pid;
  uint64_t count;
  char place[104];
  ActionRecord records[kActions];
};

std::string ActionRecord::text() const {
  const std::string action_text = get(action), inside_text = get(inside);
  CommAction doing{action_text.c_str(), inside_text.empty() ? nullptr : inside_text.c_str(), micro_batch, layer};
  if (action_text.empty()) doing.action = nullptr;
  const std::string about = doing.text(), at = step < 0 ? "" : fmt::format("step {}: ", step);
  if (phase == ActionPhase::kEnter) return at + about;
  const char* verb = phase == ActionPhase::kStart  ? "has started"
                     : phase == ActionPhase::kWait ? "waits in"
                                                   : "has done";
  return fmt::format("{}{} {}{}", at, verb, describe_operation(get(group), kind, peer, number),
                     about.empty() ? "" : fmt::format(" ({})", about));
}

std::string ActionLog::path(const std::string& folder, int rank) {
  return fmt::format("{}/rank-{}.actions", folder, rank);
}

ActionLog::ActionLog(const std::string& folder, int rank, const std::string& place) {
  const std::string name = path(folder, rank);
  const auto fail = [&](const char* what) {
    const int reason = errno;
    throw Error(ErrorCode::kIo, name, fmt::format("{}: {}", what, std::strerror(reason)));
  };
  const int fd = ::open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) fail("cannot make the file of last actions");
  // Its blocks are taken now: on a full disk a write to the mapping would be a signal later.
  const int taken = ::posix_fallocate(fd, 0, sizeof(File));
  void* memory = MAP_FAILED;
  if (taken == 0) memory = ::mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (taken != 0) errno = taken;
  const int reason = errno;
  ::close(fd);
  errno = reason;
  if (memory == MAP_FAILED) fail("cannot map the file of last actions");
  file_ = static_cast<File*>(memory);
  file_->rank = rank;
  file_->pid = ::getpid();
  put(file_->place, place);
  std::memcpy(file_->magic, kMagic, sizeof(kMagic));
}

ActionLog::~ActionLog() { ::munmap(file_, sizeof(File)); }

ActionRecord* ActionLog::begin(ActionPhase phase, const CommAction& action) {
  ActionRecord& record = file_->records[file_->count % kActions];
  std::atomic_ref(record.sequence).exchange(0, std::memory_order_acq_rel);  // before all that follows
  record.unix_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  record.phase = phase;
  record.step = step_;
  record.micro_batch = action.micro_batch;
  record.layer = action.layer;
  put(record.action, action.action ? action.action : "");
  put(record.inside, action.inside ? action.inside : "");
  return &record;
}

void ActionLog::end(ActionRecord* record) {
  std::atomic_ref(record->sequence).store(++file_->count, std::memory_order_release);
}

void ActionLog::note_step(int64_t step) {
  if (current_log) current_log->set_step(step);
}

void ActionLog::note_scope(const CommAction& action) {
  if (ActionLog* const log = current_log) log->end(log->begin(ActionPhase::kEnter, action));
}

void ActionLog::note(ActionPhase phase, const std::string& group, const Operation& operation, int world_peer) {
  ActionLog* const log = current_log;
  if (!log) return;
  ActionRecord* const record = log->begin(phase, operation.action);
  record->kind = operation.kind;
  record->number = operation.number;
  record->peer = world_peer;
  put(record->group, group);
  log->end(record);
}

ActionLogScope::ActionLogScope(ActionLog* log) : before_(current_log) { current_log = log; }
ActionLogScope::~ActionLogScope() { current_log = before_; }

std::string LastActions::last() const { return records.empty() ? "nothing yet" : records.back().text(); }

LastActions read_last_actions(const std::string& path) {
  const std::string bytes = read_text_file(path);
  ActionLog::File file;
  if (bytes.size() != sizeof(file) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0)
    throw Error(ErrorCode::kComm, path, "not a file of last actions");
  std::memcpy(&file, bytes.data(), sizeof(file));
  LastActions actions{file.rank, file.pid, get(file.place), {}};
  for (ActionRecord& record : file.records) {
    record.kind = std::min(record.kind, OperationKind::kSplit);
    record.phase = std::min(record.phase, ActionPhase::kDone);
    if (record.sequence != 0) actions.records.push_back(record);
  }
  std::sort(actions.records.begin(), actions.records.end(),
            [](const ActionRecord& a, const ActionRecord& b) { return a.sequence < b.sequence; });
  return actions;
}

}  // namespace concerto
