// A run's folder: who may train in it, what it was made with, and where to go on.
#pragma once

#include <string>

#include "concerto/checkpoint/run_lock.h"
#include "concerto/config/run_config.h"

namespace concerto {

class RunFolder {
 public:
  // Makes or enters config.run.dir and locks it. A folder made with other settings that decide the numbers is refused
  // with the differences (Error(kCheckpoint)), as is one whose checkpoints are all damaged; `resume: never` refuses a
  // folder that holds checkpoints.
  explicit RunFolder(const RunConfig& config);
  // Writes config.yaml, which binds the folder to the settings: once all of the run is checked, so that a mistake in a
  // first start can be mended.
  void write_config(const RunConfig& config) const;

  const std::string& dir() const { return dir_; }
  std::string file(const std::string& name) const { return dir_ + "/" + name; }
  // The checkpoint to go on from; empty: from the start.
  const std::string& resume_path() const { return resume_path_; }
  const std::vector<std::string>& notes() const { return notes_; }  // damaged checkpoints that were passed over

 private:
  std::string dir_;
  RunLock lock_;
  std::string resume_path_;
  std::vector<std::string> notes_;
};

}  // namespace concerto
