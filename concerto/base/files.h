// Files that survive a crash, a full disk and a damaged byte. Nothing is ever half written under its final name: data
// goes to a temporary name, is synced, then renamed. All failures are Error(kIo) with the path and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/base/error.h"

namespace concerto {

// The whole file. A file over max_bytes is an Error(kIo): nobody means to read that as text.
std::string read_text_file(const std::string& path, int64_t max_bytes = int64_t{1} << 28);

// PATH.tmp, sync, rename, sync of the folder: afterwards `path` holds all of `text`, or what it held before.
void write_file_atomic(const std::string& path, std::string_view text);

// Synced, but under its final name from the start: for files inside a StagedDirectory.
void write_file(const std::string& path, std::string_view text);

bool path_exists(const std::string& path);  // anything of that name, a dangling link too
bool is_directory(const std::string& path);
void make_directories(const std::string& path);  // with parents; fine if it is there
void remove_tree(const std::string& path);       // file or folder with all in it; fine if it is not there
void rename_path(const std::string& from, const std::string& to);
void sync_directory(const std::string& path);  // makes renames in it durable
void copy_file_synced(const std::string& from, const std::string& to);
std::vector<std::string> list_directory(
    const std::string& path);                           // names in it, sorted; empty if there is no such folder
std::string parent_directory(const std::string& path);  // "." for a bare name
std::string file_name(const std::string& path);         // last part; "a/b/" gives "b"

// A file that is being written from start to end. The destructor closes it without a sync.
class FileWriter {
 public:
  explicit FileWriter(std::string path);  // created or truncated
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  void write(const void* data, size_t bytes);
  void extend(int64_t bytes);  // the file is that long from now on, with zeros (or a hole) at its end
  void finish();               // fsync and close
  int64_t bytes() const { return bytes_; }

 private:
  std::string path_;
  int fd_ = -1;
  int64_t bytes_ = 0;
};

// Places of a file that is there already; several writers may write different places of one file. The destructor closes
// it without a sync.
class FilePatcher {
 public:
  explicit FilePatcher(std::string path);
  ~FilePatcher();
  FilePatcher(const FilePatcher&) = delete;
  FilePatcher& operator=(const FilePatcher&) = delete;
  void write_at(int64_t offset, const void* data, size_t bytes);
  void finish();  // fsync and close

 private:
  std::string path_;
  int fd_ = -1;
};

// A whole file mapped read-only. Pages come in when they are touched, so that a file larger than memory can be read
// through it.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);  // a regular file; may be empty
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A folder that appears all at once: fill path() (= FINAL.concerto.tmp, a name that only this class gives, emptied of
// what a crash left), then commit(). Not committed: removed.
class StagedDirectory {
 public:
  explicit StagedDirectory(std::string final_path);
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;
  const std::string& path() const { return temporary_; }
  // Syncs the folder and renames it. With `replace`, a folder of the final name is swapped for this one and then
  // removed; without, it is an Error(kIo).
  void commit(bool replace = false);

 private:
  std::string replace_in_two_steps();

  std::string final_, temporary_;
  bool committed_ = false;
};

// Fault injection for tests: called before each open, write, sync, rename, mkdir ("write", path); a value other than 0
// is the errno that the operation then fails with. Null removes it. Not for use while other threads do I/O.
using IoFault = std::function<int(std::string_view operation, const std::string& path)>;
void set_io_fault_for_tests(IoFault fault);

}  // namespace concerto
