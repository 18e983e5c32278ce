#include "concerto/base/files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <vector>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

class Files : public testing::Test {
 protected:
  ~Files() override { set_io_fault_for_tests(nullptr); }
  std::string at(const std::string& name) const { return dir_ + "/" + name; }
  const TestFolder folder_;
  const std::string dir_ = folder_.path();
};

template <class F>
std::string io_failure(F&& f) {
  return error_of(ErrorCode::kIo, f);
}

TEST_F(Files, AtomicWriteReadsBackAndLeavesNoTemporary) {
  write_file_atomic(at("a"), "one");
  write_file_atomic(at("a"), "two");
  EXPECT_EQ(read_text_file(at("a")), "two");
  EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"a"});
}

TEST_F(Files, EveryFailingCallLeavesTheOldFile) {
  write_file_atomic(at("a"), "old");
  int calls = 0;
  set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls, 0; });
  write_file_atomic(at("a"), "old");
  const int total = calls;
  ASSERT_GE(total, 5);  // open, write, sync, rename, open the folder, sync it
  for (int fail = 1; fail <= total; ++fail) {
    calls = 0;
    set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls == fail ? EIO : 0; });
    const std::string message = io_failure([&] { write_file_atomic(at("a"), "new"); });
    set_io_fault_for_tests(nullptr);
    EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
    EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"a"}) << fail;
    // Once renamed, the new text is there; before that, the old.
    EXPECT_EQ(read_text_file(at("a")), fail <= 4 ? "old" : "new");
  }
}

TEST_F(Files, FullDiskIsNamed) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{1000, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = io_failure([&] { write_file_atomic(at("big"), std::string(5000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("Free space"), std::string::npos) << message;
  EXPECT_TRUE(list_directory(dir_).empty());
}

TEST_F(Files, ReadingSaysWhatIsWrong) {
  EXPECT_NE(io_failure([&] { read_text_file(at("none")); }).find("No such file"), std::string::npos);
  EXPECT_NE(io_failure([&] { read_text_file(dir_); }).find("not a regular file"), std::string::npos);
  write_file_atomic(at("long"), std::string(100, 'x'));
  EXPECT_NE(io_failure([&] { read_text_file(at("long"), 99); }).find("has 100 bytes"), std::string::npos);
  EXPECT_NE(io_failure([&] { MappedFile file(at("none")); }).find("No such file"), std::string::npos);
  EXPECT_NE(io_failure([&] { MappedFile file("/dev/zero"); }).find("not a regular file"), std::string::npos);
}

// Such a path would hang whoever opened it and waited for a writer.
TEST_F(Files, APipeIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  EXPECT_NE(io_failure([&] { read_text_file(at("pipe")); }).find("not a regular file"), std::string::npos);
  EXPECT_NE(io_failure([&] { MappedFile file(at("pipe")); }).find("not a regular file"), std::string::npos);
  EXPECT_NE(io_failure([&] { copy_file_synced(at("pipe"), at("copy")); }).find("not a regular"), std::string::npos);
}

TEST_F(Files, MappedFileShowsTheBytes) {
  write_file_atomic(at("a"), "hello");
  MappedFile file(at("a"));
  const MappedFile moved = std::move(file);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(moved.bytes().data()), moved.bytes().size()), "hello");
  write_file_atomic(at("empty"), "");
  EXPECT_TRUE(MappedFile(at("empty")).bytes().empty());
  copy_file_synced(at("a"), at("b"));
  EXPECT_EQ(read_text_file(at("b")), "hello");
}

TEST_F(Files, StagedDirectoryAppearsAtOnceOrNotAtAll) {
  {
    StagedDirectory staged(at("d"));
    write_file_atomic(staged.path() + "/x", "1");
    EXPECT_FALSE(path_exists(at("d")));
  }
  EXPECT_TRUE(list_directory(dir_).empty());
  StagedDirectory staged(at("d/"));
  write_file_atomic(staged.path() + "/x", "1");
  staged.commit();
  EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"d"});
  EXPECT_EQ(read_text_file(at("d/x")), "1");
}

TEST_F(Files, StagedDirectoryReplacesOnlyWhenTold) {
  make_directories(at("d"));
  write_file_atomic(at("d/old"), "1");
  {
    StagedDirectory staged(at("d"));
    EXPECT_NE(io_failure([&] { staged.commit(); }).find("exists already"), std::string::npos);
  }
  EXPECT_EQ(list_directory(at("d")), std::vector<std::string>{"old"});
  StagedDirectory staged(at("d"));
  write_file_atomic(staged.path() + "/new", "2");
  staged.commit(true);
  EXPECT_EQ(list_directory(at("d")), std::vector<std::string>{"new"});
  EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"d"});
}

// On a file system that cannot exchange two folders (EINVAL), any rename may fail: the old folder stays or comes back.
TEST_F(Files, StagedDirectoryReplacesInTwoStepsOrNotAtAll) {
  const auto renames_that_fail = [&](std::vector<int> which) {
    return [which, calls = 0](std::string_view operation, const std::string&) mutable {
      if (operation != "rename") return 0;
      if (++calls == 1) return EINVAL;
      return std::find(which.begin(), which.end(), calls) == which.end() ? 0 : EIO;
    };
  };
  const auto start = [&](std::vector<int> failing) {
    set_io_fault_for_tests(nullptr);
    for (const std::string& name : list_directory(dir_)) remove_tree(at(name));
    make_directories(at("d"));
    write_file_atomic(at("d/old"), "1");
    // Not before the first file of the new folder is written: that is a rename as well.
    return [=, this] {
      StagedDirectory staged(at("d"));
      write_file_atomic(staged.path() + "/new", "2");
      set_io_fault_for_tests(renames_that_fail(failing));
      staged.commit(true);
    };
  };
  start({})();
  EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"d"});
  EXPECT_EQ(list_directory(at("d")), std::vector<std::string>{"new"});
  for (const int failing : {2, 3}) {
    io_failure(start({failing}));
    EXPECT_EQ(list_directory(dir_), std::vector<std::string>{"d"}) << failing;
    EXPECT_EQ(list_directory(at("d")), std::vector<std::string>{"old"}) << failing;
  }
  const std::string message = io_failure(start({3, 4}));
  EXPECT_NE(message.find("The old folder is now " + at("d.old.concerto.tmp")), std::string::npos) << message;
  EXPECT_EQ(list_directory(at("d.old.concerto.tmp")), std::vector<std::string>{"old"});
}

TEST_F(Files, StagedDirectoryRemovesWhatACrashLeft) {
  make_directories(at("d.concerto.tmp"));
  write_file_atomic(at("d.concerto.tmp/stale"), "1");
  StagedDirectory staged(at("d"));
  staged.commit();
  EXPECT_TRUE(list_directory(at("d")).empty());
}

// Folders that a user has beside the output, whatever they are called.
TEST_F(Files, StagedDirectoryLeavesItsNeighboursAlone) {
  const std::vector<std::string> neighbours = {"d.bak", "d.old", "d.old.tmp", "d.tmp"};
  for (const std::string& name : neighbours) {
    make_directories(at(name));
    write_file_atomic(at(name + "/mine"), "1");
  }
  for (const bool replace : {false, true}) {
    StagedDirectory staged(at("d"));
    write_file_atomic(staged.path() + "/x", "1");
    staged.commit(replace);
  }
  { const StagedDirectory not_committed(at("d")); }
  for (const std::string& name : neighbours) EXPECT_EQ(read_text_file(at(name + "/mine")), "1") << name;
  EXPECT_EQ(list_directory(dir_), (std::vector<std::string>{"d", "d.bak", "d.old", "d.old.tmp", "d.tmp"}));
}

TEST_F(Files, PlacesOfAFileAreWrittenByMany) {
  {
    FileWriter writer(at("f"));
    writer.write("head", 4);
    writer.extend(10);
    EXPECT_EQ(writer.bytes(), 10);
    writer.finish();
    EXPECT_THROW(writer.extend(20), Bug);
  }
  EXPECT_EQ(read_text_file(at("f")), std::string("head\0\0\0\0\0\0", 10));
  FilePatcher a(at("f")), b(at("f"));
  b.write_at(7, "xyz", 3);
  a.write_at(4, "abc", 3);
  a.finish();
  b.finish();
  EXPECT_EQ(read_text_file(at("f")), "headabcxyz");
  EXPECT_THROW(a.write_at(0, "x", 1), Bug);
  EXPECT_NE(io_failure([&] { FilePatcher none(at("none")); }).find("No such file"), std::string::npos);
  set_io_fault_for_tests([](std::string_view operation, const std::string&) { return operation == "write" ? EIO : 0; });
  EXPECT_NE(io_failure([&] { FilePatcher(at("f")).write_at(0, "x", 1); }).find("cannot write"), std::string::npos);
  EXPECT_NE(io_failure([&] { FileWriter(at("g")).extend(5); }).find("cannot write"), std::string::npos);
  set_io_fault_for_tests(nullptr);
}

TEST_F(Files, Names) {
  EXPECT_EQ(parent_directory("a/b/c"), "a/b");
  EXPECT_EQ(parent_directory("a/b/"), "a");
  EXPECT_EQ(parent_directory("a"), ".");
  EXPECT_EQ(parent_directory("/a"), "/");
  EXPECT_EQ(parent_directory("/"), "/");
  EXPECT_EQ(file_name("a/b/c"), "c");
  EXPECT_EQ(file_name("a/b/"), "b");
  EXPECT_EQ(file_name("c"), "c");
  EXPECT_TRUE(list_directory(at("none")).empty());
  EXPECT_NE(io_failure([&] { rename_path(at("none"), at("x")); }).find("No such file"), std::string::npos);
  EXPECT_NE(io_failure([&] { sync_directory(at("none")); }).find("No such file"), std::string::npos);
}

}  // namespace
}  // namespace concerto
