// Everything wrong with a settings file, gathered so that the user sees it at once.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "concerto/base/error.h"

namespace concerto {

inline constexpr const char* kCommandLine = "command line";  // the `file` of an override

struct Fault {
  std::string file;  // file name, kCommandLine, or empty
  int line = 0;      // 0: unknown
  std::string key;   // may be empty
  std::string what, fix;
};

class Faults {
 public:
  void add(Fault fault);
  void note(std::string text) { notes_.push_back(std::move(text)); }  // nothing is wrong, but the user should know
  const std::vector<std::string>& notes() const { return notes_; }
  bool empty() const { return list_.empty(); }
  bool has_key(const std::string& key) const { return keys_.contains(key); }  // this key already has a fault
  const std::vector<Fault>& list() const { return list_; }
  // Throws one Error whose message has one line a fault: `FILE:LINE: key: what. fix`. Does nothing when there is none.
  void throw_if_any(ErrorCode code) const;

 private:
  std::vector<Fault> list_;
  std::set<std::string> keys_;
  std::vector<std::string> notes_;
};

// The name of `names` nearest to `word` by edit distance, if it is near enough to be a slip of the pen; else "".
std::string nearest_name(const std::string& word, const std::vector<std::string>& names);

}  // namespace concerto
