#include "concerto/base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "concerto/base/mapping_fault.h"

namespace concerto {
namespace fs = std::filesystem;
namespace {

IoFault io_fault;

// True, with errno set, when a test wants this operation to fail.
bool faulted(std::string_view operation, const std::string& path) {
  if (!io_fault) return false;
  errno = io_fault(operation, path);
  return errno != 0;
}

Error io_error(const std::string& path, std::string_view operation, int code) {
  std::string fix;
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) fix = "Free space on the disk or choose another folder.";
  if (code == EACCES || code == EPERM || code == EROFS) fix = "Check the permissions of the file and of its folder.";
  return Error(ErrorCode::kIo, path, fmt::format("cannot {}: {}", operation, std::generic_category().message(code)),
               fix);
}

Error io_error(const std::string& path, std::string_view operation) { return io_error(path, operation, errno); }

int open_file(const std::string& path, int flags, std::string_view operation) {
  int fd = -1;
  if (!faulted("open", path)) do {
      fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EINTR);
  if (fd < 0) throw io_error(path, operation);
  return fd;
}

// Without O_NONBLOCK, opening a pipe waits until somebody writes to it; on a regular file the flag does nothing.
constexpr int kRead = O_RDONLY | O_NONBLOCK;

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

int64_t regular_file_size(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw io_error(path, "read");
  if (!S_ISREG(status.st_mode)) throw Error(ErrorCode::kIo, path, "is not a regular file");
  return status.st_size;
}

template <class Write>
void write_all(const std::string& path, const void* data, size_t bytes, Write&& write) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = faulted("write", path) ? -1 : write(p, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw io_error(path, "write");
    p += n;
    bytes -= static_cast<size_t>(n);
  }
}

void sync_and_close(const std::string& path, int& fd) {
  CHECK(fd >= 0, "{} is finished", path);
  if (faulted("sync", path) || ::fsync(fd) != 0) throw io_error(path, "sync");
  if (::close(std::exchange(fd, -1)) != 0) throw io_error(path, "close");
}

}  // namespace

void set_io_fault_for_tests(IoFault fault) { io_fault = std::move(fault); }

std::string read_text_file(const std::string& path, int64_t max_bytes) {
  const Descriptor file{open_file(path, kRead, "open")};
  const int64_t size = regular_file_size(file.fd, path);
  if (size > max_bytes)
    throw Error(ErrorCode::kIo, path, fmt::format("has {} bytes, at most {} were expected", size, max_bytes));
  std::string text(static_cast<size_t>(size), '\0');
  size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = ::read(file.fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw io_error(path, "read");
    if (n == 0) break;  // it shrank meanwhile
    at += static_cast<size_t>(n);
  }
  text.resize(at);
  return text;
}

void write_file(const std::string& path, std::string_view text) {
  FileWriter writer(path);
  writer.write(text.data(), text.size());
  writer.finish();
}

void write_file_atomic(const std::string& path, std::string_view text) {
  const std::string temporary = path + ".tmp";
  try {
    write_file(temporary, text);
    rename_path(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory(parent_directory(path));
}

bool path_exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

bool is_directory(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

void make_directories(const std::string& path) {
  if (faulted("mkdir", path)) throw io_error(path, "make the folder");
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw io_error(path, "make the folder", error.value());
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw io_error(path, "remove", error.value());
}

void rename_path(const std::string& from, const std::string& to) {
  if (faulted("rename", from) || ::rename(from.c_str(), to.c_str()) != 0) throw io_error(from, "rename to " + to);
}

void sync_directory(const std::string& path) {
  const Descriptor folder{open_file(path, O_RDONLY | O_DIRECTORY, "open the folder")};
  // Some file systems cannot sync a folder and say EINVAL; their renames are as durable as they get.
  if (faulted("sync", path) || (::fsync(folder.fd) != 0 && errno != EINVAL)) throw io_error(path, "sync the folder");
}

void copy_file_synced(const std::string& from, const std::string& to) {
  const MappedFile source(from);
  FileWriter writer(to);
  writer.write(source.bytes().data(), source.bytes().size());
  writer.finish();
}

std::vector<std::string> list_directory(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory) throw io_error(path, "list the folder", error.value());
  std::sort(names.begin(), names.end());
  return names;
}

std::string file_name(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path;
  const size_t slash = path.rfind('/', end);
  return path.substr(slash == std::string::npos ? 0 : slash + 1,
                     end - (slash == std::string::npos ? 0 : slash + 1) + 1);
}

std::string parent_directory(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  const size_t slash = end == std::string::npos ? std::string::npos : path.rfind('/', end);
  if (slash == std::string::npos) return path.starts_with('/') ? "/" : ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

FileWriter::FileWriter(std::string path)
    : path_(std::move(path)), fd_(open_file(path_, O_WRONLY | O_CREAT | O_TRUNC, "create")) {}

FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void FileWriter::write(const void* data, size_t bytes) {
  CHECK(fd_ >= 0, "{} is finished", path_);
  write_all(path_, data, bytes, [&](const char* p, size_t n) { return ::write(fd_, p, n); });
  bytes_ += static_cast<int64_t>(bytes);
}

void FileWriter::extend(int64_t bytes) {
  CHECK(fd_ >= 0 && bytes >= bytes_, "{}: {} bytes of {}", path_, bytes, bytes_);
  if (faulted("write", path_) || ::ftruncate(fd_, bytes) != 0) throw io_error(path_, "write");
  bytes_ = bytes;
}

void FileWriter::finish() { sync_and_close(path_, fd_); }

FilePatcher::FilePatcher(std::string path) : path_(std::move(path)), fd_(open_file(path_, O_WRONLY, "open")) {}

FilePatcher::~FilePatcher() {
  if (fd_ >= 0) ::close(fd_);
}

void FilePatcher::write_at(int64_t offset, const void* data, size_t bytes) {
  CHECK(fd_ >= 0, "{} is finished", path_);
  write_all(path_, data, bytes, [&](const char* p, size_t n) {
    const ssize_t written = ::pwrite(fd_, p, n, offset);
    if (written > 0) offset += written;
    return written;
  });
}

void FilePatcher::finish() { sync_and_close(path_, fd_); }

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file{open_file(path, kRead, "open")};
  const int64_t size = regular_file_size(file.fd, path);
  if (size == 0) return;
  void* p = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_SHARED, file.fd, 0);
  if (p == MAP_FAILED) throw io_error(path, "map");
  data_ = static_cast<const std::byte*>(p);
  size_ = static_cast<size_t>(size);
  note_mapping(data_, size_, path);
}

MappedFile::~MappedFile() {
  if (!data_) return;
  forget_mapping(data_);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& o) noexcept
    : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

StagedDirectory::StagedDirectory(std::string final_path) : final_(std::move(final_path)) {
  while (final_.size() > 1 && final_.ends_with('/')) final_.pop_back();
  temporary_ = final_ + ".concerto.tmp";
  remove_tree(temporary_);
  make_directories(temporary_);
}

StagedDirectory::~StagedDirectory() {
  if (committed_) return;
  std::error_code ignored;  // a destructor does not throw, and *.tmp is never mistaken for a whole folder
  fs::remove_all(temporary_, ignored);
}

// For file systems that cannot exchange two folders. Returns where the old one is now.
std::string StagedDirectory::replace_in_two_steps() {
  const std::string old = final_ + ".old.concerto.tmp";
  remove_tree(old);
  rename_path(final_, old);
  try {
    rename_path(temporary_, final_);
  } catch (const Error& e) {
    try {
      rename_path(old, final_);
    } catch (const Error&) {
      throw Error(ErrorCode::kIo, e.where, e.problem, fmt::format("The old folder is now {}: rename it back.", old));
    }
    throw;
  }
  return old;
}

void StagedDirectory::commit(bool replace) {
  sync_directory(temporary_);
  if (replace && path_exists(final_)) {
    // One step, so that there is no moment without a folder of that name; where the file system cannot do it, two.
    std::string old = temporary_;
    if (faulted("rename", temporary_) ||
        ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, final_.c_str(), RENAME_EXCHANGE) != 0) {
      if (errno != EINVAL && errno != ENOSYS) throw io_error(temporary_, "rename to " + final_);
      old = replace_in_two_steps();
    }
    sync_directory(parent_directory(final_));
    committed_ = true;
    std::error_code ignored;  // the new folder is in place: what stays of the old one is only waste
    fs::remove_all(old, ignored);
    return;
  }
  // rename() would silently replace an empty folder; the caller was promised an error.
  if (path_exists(final_)) throw Error(ErrorCode::kIo, final_, "exists already", "Choose another folder or remove it.");
  rename_path(temporary_, final_);
  committed_ = true;
  sync_directory(parent_directory(final_));
}

}  // namespace concerto
