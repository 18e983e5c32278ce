// One process at a time trains in a run folder.
#pragma once

#include <string>

namespace concerto {

// Held from construction to destruction, and released by the system when the process dies, however it dies.
class RunLock {
 public:
  // Makes the folder if need be. Error(kCheckpoint) naming the process id if another process (or another RunLock of
  // this one) holds it.
  explicit RunLock(const std::string& run_dir);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace concerto
