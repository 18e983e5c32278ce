#include "concerto/config/faults.h"

#include <algorithm>
#include <numeric>

namespace concerto {
namespace {

std::string where_of(const Fault& fault) {
  std::string where = fault.file;
  if (fault.line > 0) where += fmt::format(":{}", fault.line);
  if (!fault.key.empty()) where += (where.empty() ? "" : ": ") + fault.key;
  return where;
}

// Levenshtein distance where two neighbours that changed places count as one slip.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

}  // namespace

void Faults::add(Fault fault) {
  if (!fault.key.empty()) keys_.insert(fault.key);
  list_.push_back(std::move(fault));
}

void Faults::throw_if_any(ErrorCode code) const {
  if (list_.empty()) return;
  if (list_.size() == 1) throw Error(code, where_of(list_[0]), list_[0].what, list_[0].fix);
  std::string lines;
  for (const Fault& fault : list_) {
    if (!lines.empty()) lines += '\n';
    lines += Error(code, where_of(fault), fault.what, fault.fix).what();
  }
  throw Error(code, "", lines);
}

std::string nearest_name(const std::string& word, const std::vector<std::string>& names) {
  if (word.size() > 100) return "";  // not a name; the distance costs the product of the lengths
  std::string best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    // A cut-off name is near: seq_len for seq_length.
    const bool cut = word.size() >= 3 && 2 * word.size() >= name.size() && name.starts_with(word);
    const size_t distance = cut ? 1 : edit_distance(word, name);
    if (distance < best_distance) {
      best_distance = distance;
      best = name;
    }
  }
  return best;
}

}  // namespace concerto
