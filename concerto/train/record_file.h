// Files that grow by whole records while a run goes on: metrics.jsonl, TensorBoard events.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace concerto {

// Gets one line without a newline. Monitoring never stops a training run: what it cannot write it says here, once a
// file.
using Warn = std::function<void(const std::string&)>;
void warn_on_stderr(const std::string& line);

// Appends records with one write each, so that a killed process leaves whole records. After a failed write (disk full)
// the part that reached the file is cut off again, the record is lost, and later records are tried as usual. No
// allocation in append().
class RecordFile {
 public:
  // Opens or creates `path` for appending. Error(kIo) if that is not possible.
  explicit RecordFile(std::string path, Warn warn = warn_on_stderr);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  bool append(std::string_view record);  // false: lost
  void sync();                           // to the disk; before a checkpoint counts on the records
  const std::string& path() const { return path_; }

 private:
  void warn(const char* what);
  std::string path_;
  Warn warn_;
  int fd_ = -1;
  int64_t size_ = 0;  // bytes of whole records
  bool warned_ = false;
};

}  // namespace concerto
