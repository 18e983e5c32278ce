// How ranks do a piece of work together without a collective: each does its part, tells rank 0 how that went, and hears
// from it whether the whole stands. All of them end alike, with the same Error if any part failed.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "concerto/base/error.h"
#include "concerto/comm/communicator.h"

namespace concerto {

class RankReports {
 public:
  explicit RankReports(Communicator* world) : world_(world) {}  // null: one rank
  int rank() const { return world_ ? world_->rank() : 0; }
  int size() const { return world_ ? world_->size() : 1; }

  using Work = std::function<std::string()>;
  // What rank 0 makes of all ranks' texts.
  using Decide = std::function<std::string(const std::vector<std::string>& texts)>;

  // Every rank does its `work`; if no one's failed, rank 0 decides, and its text is returned on all ranks. If one threw
  // an Error (of several: that of the lowest rank), or `decide` did, all throw that Error. Any other exception goes on
  // in the rank that met it; the others throw an Error(kIo) of its text.
  std::string agree(const Work& work, const Decide& decide = {}) const;
  // Rank 0 does the work; all return its text, or throw its Error.
  std::string announce(const Work& work) const;

 private:
  struct Report {
    std::string text;
    std::optional<Error> error;
    std::exception_ptr thrown;  // here
  };
  Report attempt(const Work& work) const;
  std::optional<Error> first_error(const std::vector<Report>& reports) const;
  Report from_wire(const std::string& wire) const;
  void send(const Report& report, int to) const;
  Report receive(int from) const;
  std::string end_with(const Report& own, const Report& verdict) const;

  Communicator* world_;
};

// Deals pieces of work out in contiguous runs of about the same number of bytes: the rank of each piece.
std::vector<int> deal(const std::vector<int64_t>& bytes, int ranks);

}  // namespace concerto
