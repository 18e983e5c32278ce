#include "concerto/train/record_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "concerto/base/error.h"

namespace concerto {
namespace {

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

}  // namespace

void warn_on_stderr(const std::string& line) { std::fprintf(stderr, "warning: %s\n", line.c_str()); }

RecordFile::RecordFile(std::string path, Warn warn) : path_(std::move(path)), warn_(std::move(warn)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    throw Error(ErrorCode::kIo, path_, fmt::format("cannot be opened for writing: {}", std::strerror(errno)),
                "Check that the folder exists and may be written to.");
  }
  struct stat info {};
  if (::fstat(fd_, &info) == 0) size_ = info.st_size;
}

RecordFile::~RecordFile() {
  if (fd_ >= 0) ::close(fd_);
}

bool RecordFile::append(std::string_view record) {
  if (write_all(fd_, record)) {
    size_ += static_cast<int64_t>(record.size());
    return true;
  }
  const int reason = errno;
  // A device that cannot be cut (as /dev/full) takes no part of a record either.
  [[maybe_unused]] const int cut = ::ftruncate(fd_, size_);
  warn(std::strerror(reason));
  return false;
}

void RecordFile::sync() {
  if (::fdatasync(fd_) != 0 && errno != EINVAL && errno != EROFS) warn(std::strerror(errno));
}

void RecordFile::warn(const char* what) {
  if (std::exchange(warned_, true)) return;
  if (warn_)
    warn_(fmt::format("{}: {}. Training goes on; records are missing there until writing works again.", path_, what));
}

}  // namespace concerto
