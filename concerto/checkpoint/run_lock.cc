#include "concerto/checkpoint/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "concerto/base/files.h"

namespace concerto {

RunLock::RunLock(const std::string& run_dir) {
  make_directories(run_dir);
  const std::string path = run_dir + "/.lock";
  const auto fail = [&](const char* operation) {
    const int code = errno;
    if (fd_ >= 0) ::close(fd_);
    throw Error(ErrorCode::kIo, path, fmt::format("cannot {}: {}", operation, std::generic_category().message(code)),
                "Check the permissions of the folder, or choose another run.dir.");
  };
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("open");
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail("lock");
    char text[32] = {};
    const ssize_t n = ::pread(fd_, text, sizeof text - 1, 0);
    ::close(fd_);
    const long pid = n > 0 ? std::strtol(text, nullptr, 10) : 0;
    throw Error(ErrorCode::kCheckpoint, run_dir,
                pid > 0 ? fmt::format("is in use by process {}", pid) : "is in use by another process",
                "Wait for it, stop it, or choose another run.dir.");
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  // The lock file stays when the run ends: removing it would let two processes hold locks on two files of one name.
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, pid.data(), pid.size(), 0) < 0) {
    // A full disk: the lock holds all the same, only the number is missing for whoever is refused.
  }
}

RunLock::~RunLock() { ::close(fd_); }

}  // namespace concerto
