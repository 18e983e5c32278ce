// Over all pipelines that the builders make, over random legal ones, and over random broken ones: the validator takes
// the sound and refuses the others, as a second player does that was written for this test alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <set>

#include "concerto/base/error.h"
#include "concerto/base/rng.h"
#include "concerto/schedule/pipeline.h"

namespace concerto {
namespace {

using Kind = ActionKind;
constexpr const char* kNames[] = {"1f1b", "interleaved", "zero_bubble", "zero_bubble_v"};

bool exists(const PipelineOptions& o) {
  if (o.name == "interleaved") return o.pp == 1 || o.vpp > 1;
  return o.vpp == 1 || (o.name == "zero_bubble_v" && o.vpp == 2);
}

std::string text(const PipelineOptions& o) {
  return fmt::format("{} pp {} vpp {} m {}{}", o.name, o.pp, o.vpp, o.micro_batches, o.together ? " together" : "");
}

void for_all_options(int64_t most_micro_batches, const std::function<void(const PipelineOptions&)>& visit) {
  for (const char* name : kNames)
    for (int pp = 1; pp <= 8; ++pp)
      for (int vpp = 1; vpp <= 4; ++vpp)
        for (int64_t m = 0; m <= most_micro_batches; ++m)
          for (const bool together : {false, true}) visit({name, pp, vpp, m, together});
}

// What the papers state, of the rank that holds most: in micro-batches of a chunk.
int64_t published_in_flight(const PipelineOptions& o) {
  if (o.together) return o.micro_batches * (o.name == "zero_bubble_v" ? 2 : o.vpp);
  if (o.name == "zero_bubble_v") return 2 * o.pp;
  if (o.name != "interleaved") return o.pp;
  // A share (p - 1) / (p v) more than 1F1B, where p divides m; else groups are larger, and p there is their size.
  const int64_t groups = std::max<int64_t>(o.micro_batches / o.pp, 1);
  const int64_t group = (o.micro_batches + groups - 1) / groups;
  return 2 * (o.pp - 1) + (o.vpp - 1) * group + 1;
}

TEST(PipelineProperty, EveryBuiltPipelineIsSound) {
  for_all_options(40, [](const PipelineOptions& o) {
    if (!exists(o)) {
      EXPECT_THROW(build_pipeline(o), Error) << text(o);
      return;
    }
    const PipelineSchedule s = build_pipeline(o);
    ASSERT_NO_THROW(validate_pipeline(s)) << text(o);
    const int64_t computes = o.micro_batches * s.chunks * (s.split ? 3 : 2);
    for (const auto& list : s.ranks)
      EXPECT_EQ(std::count_if(list.begin(), list.end(), [](const Action& a) { return is_compute(a.kind); }), computes);
    for (const int64_t peak : peak_in_flight(s)) EXPECT_LE(peak, published_in_flight(o)) << text(o);
    const double bubble = time_pipeline(s).bubble, bound = bubble_bound(o);
    EXPECT_GE(bubble, bound - 1e-9) << text(o);
    if (o.micro_batches >= 2 * o.pp) {
      EXPECT_LT(bubble, bound + 0.01) << text(o);
    }
  });
}

// Straight zero-bubble and the V hold no more than 1F1B, which holds pp micro-batches on its first rank; not in slots
// either, where two of the V's are one of the others'.
TEST(PipelineProperty, ZeroBubbleHoldsNoMoreThan1F1B) {
  for (int pp = 1; pp <= 8; ++pp)
    for (int64_t m = 1; m <= 40; ++m)
      for (const auto& slots : build_pipeline({"zero_bubble_v", pp, 1, m}).slots)
        EXPECT_LE(slots[0] + slots[1], 2 * pp) << pp << " " << m;
  for (int pp = 1; pp <= 8; ++pp)
    for (int64_t m = 1; m <= 40; ++m)
      for (const auto& slots : build_pipeline({"zero_bubble", pp, 1, m}).slots) EXPECT_LE(slots[0], pp);
}

TEST(PipelineProperty, BoundHoldsAtAnyTimes) {
  const Rng rng(5, "times");
  uint64_t draw = 0;
  const auto time = [&] { return 0.25 + static_cast<double>(rng.below(draw++, 12)) / 4; };
  for (const bool together : {false, true})
    for (const char* name : kNames)
      for (int i = 0; i < 300; ++i) {
        const int pp = 1 + static_cast<int>(rng.below(draw++, 8));
        const int64_t m = 1 + static_cast<int64_t>(rng.below(draw++, 24));
        const PipelineOptions o{name, pp, name == std::string("interleaved") ? 2 : 1, m, together};
        const StageTimes t{time(), time(), time()};
        EXPECT_GE(time_pipeline(build_pipeline(o), t).bubble, bubble_bound(o, t) - 1e-9)
            << text(o) << " F " << t.forward << " I " << t.backward_input << " W " << t.backward_weight;
      }
}

// The second player: ranks as machines that take one step each in random turn; messages lie at the sender until they
// are received. Empty if all lists end, else why not.
class Machines {
 public:
  Machines(const PipelineSchedule& s, uint64_t seed) : s_(s), rng_(seed, "turns"), at_(s.ranks.size(), 0) {
    for (int r = 0; r < s.pp; ++r)
      for (int c = 0; c < s.chunks; ++c)
        for (int64_t i = 0; i < s.slots[r][c]; ++i) free_[{r, c}].push_back(kNobody);
  }

  std::string run() {
    size_t left = 0;
    for (const auto& list : s_.ranks) left += list.size();
    for (uint64_t draw = 0; left > 0;) {
      const int first = static_cast<int>(rng_.below(draw++, static_cast<uint64_t>(s_.pp)));
      bool moved = false;
      for (int i = 0; i < s_.pp && !moved; ++i) moved = turn((first + i) % s_.pp);
      if (!fault_.empty()) return fault_;
      if (!moved) return "standstill";
      --left;
    }
    const size_t wanted = static_cast<size_t>(s_.stages() * s_.micro_batches) * (s_.split ? 3 : 2);
    const bool all = finished_ == s_.stages() * s_.micro_batches && computed_.size() == wanted;
    return all && ways_empty() ? "" : "something is missing";
  }

 private:
  using Work = std::tuple<Kind, int, int32_t>;  // kind, virtual stage, micro-batch
  static constexpr int32_t kNobody = -1;

  bool fail(const char* why) {
    fault_ = why;
    return true;
  }
  bool did(Kind kind, int stage, int32_t m) const { return computed_.contains({kind, stage, m}); }
  bool ways_empty() const {
    return std::all_of(ways_.begin(), ways_.end(), [](const auto& way) { return way.second.empty(); });
  }

  bool turn(int r) {
    if (at_[r] == s_.ranks[r].size()) return false;
    const Action a = s_.ranks[r][at_[r]];
    if (a.micro_batch < 0 || a.micro_batch >= s_.micro_batches || a.chunk < 0 || a.chunk >= s_.chunks)
      return fail("nobody's");
    const int v = s_.virtual_stage(r, a.chunk);
    if (!step(r, v, a)) return false;
    ++at_[r];
    return true;
  }

  bool step(int r, int v, const Action& a) {
    const int32_t m = a.micro_batch;
    const Kind input = s_.split ? Kind::kBackwardInput : Kind::kBackward;
    switch (a.kind) {
      case Kind::kSendForward:
        return send(r, v, v + 1, Kind::kForward, m);
      case Kind::kSendBackward:
        return send(r, v, v - 1, input, m);
      case Kind::kRecvForward:
        if (v == 0) return fail("receives from nobody");
        return receive(r, v - 1, v, true, m);
      case Kind::kRecvBackward:
        if (v + 1 == s_.stages()) return fail("receives from nobody");
        if (!did(Kind::kForward, v, m)) return fail("gradients before activations");
        return receive(r, v + 1, v, false, m);
      case Kind::kForward:
        if (did(Kind::kForward, v, m)) return fail("twice");
        if (v > 0 && s_.rank_of(v - 1) != r ? !arrived_.contains({Kind::kForward, v, m})
                                            : v > 0 && !did(Kind::kForward, v - 1, m))
          return fail("forward too early");
        if ((v == 0 || s_.rank_of(v - 1) == r) && !take(r, a.chunk)) return false;
        break;
      case Kind::kBackwardWeight:
        if (!s_.split || !did(Kind::kBackwardInput, v, m)) return fail("W too early");
        if (did(a.kind, v, m)) return fail("twice");
        if (v + 1 < s_.stages() && s_.rank_of(v + 1) == r && !did(a.kind, v + 1, m)) return fail("slot is still read");
        leave(r, a.chunk, m);
        break;
      default:
        if (a.kind != input || did(input, v, m) || !did(Kind::kForward, v, m)) return fail("backward twice or early");
        if (v + 1 < s_.stages() && (s_.rank_of(v + 1) != r ? !arrived_.contains({input, v, m}) : !did(input, v + 1, m)))
          return fail("backward too early");
        if (!s_.split) leave(r, a.chunk, m);
    }
    computed_.insert({a.kind, v, m});
    return true;
  }

  bool send(int r, int from, int to, Kind kind, int32_t m) {
    if (to < 0 || to >= s_.stages() || s_.rank_of(to) == r) return fail("sends to nobody");
    if (!did(kind, from, m) || !sent_.insert({kind, from, m}).second) return fail("sends what is not there, or twice");
    ways_[{r, s_.rank_of(to), to > from}].push_back({from, m});
    return true;
  }

  bool receive(int r, int from, int to, bool forward, int32_t m) {
    if (s_.rank_of(from) == r) return fail("receives from nobody");
    const Kind kind = forward ? Kind::kForward : s_.split ? Kind::kBackwardInput : Kind::kBackward;
    if (arrived_.contains({kind, to, m})) return fail("receives twice");
    auto& way = ways_[{s_.rank_of(from), r, forward}];
    if (way.empty()) return false;
    if (way.front() != std::pair(from, m)) return fail("receives another");
    if (forward && !take(r, s_.chunk_of(to))) return false;
    way.pop_front();
    arrived_.insert({kind, to, m});
    return true;
  }

  // False: it has to wait. More in flight than slots: there is none to wait for.
  bool take(int r, int chunk) {
    auto& free = free_[{r, chunk}];
    if (free.empty()) return fail("no slot"), false;
    const int v = s_.virtual_stage(r, chunk);
    if (free.front() != kNobody && s_.receives(r, chunk)) {
      const Kind input = s_.split ? Kind::kBackwardInput : Kind::kBackward;
      if (!arrived_.contains({input, v - 1, free.front()})) return false;
    }
    free.pop_front();
    return true;
  }
  void leave(int r, int chunk, int32_t m) {
    free_[{r, chunk}].push_back(m);
    ++finished_;
  }

  const PipelineSchedule& s_;
  const Rng rng_;
  std::vector<size_t> at_;
  std::map<std::pair<int, int>, std::deque<int32_t>> free_;  // by the micro-batch that left it
  std::map<std::tuple<int, int, bool>, std::deque<std::pair<int, int32_t>>> ways_;
  std::set<Work> computed_, sent_, arrived_;  // arrived: at this virtual stage
  int64_t finished_ = 0;
  std::string fault_;
};

std::string verdict(const PipelineSchedule& s) {
  try {
    validate_pipeline(s);
  } catch (const Bug& bug) {
    return bug.what();
  }
  return "";
}

// Fixed orders of sends and receives have deadlocked pipelines of four and more stages (Megatron-LM#5100): here every
// schedule ends on a transport without buffers, whoever's turn it is.
TEST(PipelineProperty, NoDeadlockWithoutBuffers) {
  for_all_options(17, [](const PipelineOptions& o) {
    if (!exists(o) || o.pp == 1 || (o.micro_batches > 3 && o.micro_batches % 7 != 3)) return;
    const PipelineSchedule s = build_pipeline(o);
    for (uint64_t seed = 0; seed < 2; ++seed) EXPECT_EQ(Machines(s, seed).run(), "") << text(o);
  });
}

PipelineOptions random_options(const Rng& rng, uint64_t& draw) {
  PipelineOptions o;
  o.name = kNames[rng.below(draw++, 4)];
  o.pp = 1 + static_cast<int>(rng.below(draw++, 5));
  o.vpp = o.name == "interleaved" ? 2 + static_cast<int>(rng.below(draw++, 2)) : 1;
  o.micro_batches = 1 + static_cast<int64_t>(rng.below(draw++, 9));
  return o;
}

// Compute actions of all ranks in a random order that obeys nothing but causes and the order on each way.
PipelineSchedule random_order(const PipelineOptions& o, const Rng& rng, uint64_t& draw) {
  PipelineSchedule s = build_pipeline(o);
  const Kind input = s.split ? Kind::kBackwardInput : Kind::kBackward;
  s.name = "random";
  s.ranks.assign(s.pp, {});
  std::map<std::tuple<int, int, bool>, std::deque<std::pair<int, int32_t>>> ways;
  std::set<std::tuple<Kind, int, int32_t>> done;
  const auto did = [&](Kind kind, int v, int32_t m) { return done.contains({kind, v, m}); };
  // From the neighbour `from`: on another rank, the message is the next on its way; on the same, it is done.
  const auto has = [&](Kind kind, int from, int v, int32_t m) {
    if (from < 0 || from >= s.stages()) return true;
    if (s.rank_of(from) == s.rank_of(v)) return did(kind, from, m);
    const auto& way = ways[{s.rank_of(from), s.rank_of(v), from < v}];
    return !way.empty() && way.front() == std::pair(from, m);
  };
  const size_t wanted = static_cast<size_t>(s.stages() * s.micro_batches) * (s.split ? 3 : 2);
  while (done.size() < wanted) {
    const int v = static_cast<int>(rng.below(draw++, static_cast<uint64_t>(s.stages())));
    const auto m = static_cast<int32_t>(rng.below(draw++, static_cast<uint64_t>(s.micro_batches)));
    const Kind kind = std::array{Kind::kForward, input, Kind::kBackwardWeight}[rng.below(draw++, s.split ? 3 : 2)];
    if (did(kind, v, m)) continue;
    const int step = kind == Kind::kForward ? 1 : -1;
    const bool read = v + 1 < s.stages() && s.rank_of(v + 1) == s.rank_of(v) && !did(Kind::kBackwardWeight, v + 1, m);
    if (kind == Kind::kBackwardWeight ? !did(input, v, m) || read
                                      : !has(kind, v - step, v, m) || (kind == input && !did(Kind::kForward, v, m)))
      continue;
    done.insert({kind, v, m});
    s.ranks[s.rank_of(v)].push_back({kind, m, s.chunk_of(v)});
    if (kind == Kind::kBackwardWeight) continue;
    const int from = v - step, to = v + step;
    if (from >= 0 && from < s.stages() && s.rank_of(from) != s.rank_of(v))
      ways[{s.rank_of(from), s.rank_of(v), from < v}].pop_front();
    if (to >= 0 && to < s.stages() && s.rank_of(to) != s.rank_of(v))
      ways[{s.rank_of(v), s.rank_of(to), to > v}].push_back({v, m});
  }
  return complete_pipeline(std::move(s));
}

TEST(PipelineProperty, AnyLegalOrderPasses) {
  const Rng rng(1, "orders");
  uint64_t draw = 0;
  for (int i = 0; i < 300; ++i) {
    const PipelineOptions o = random_options(rng, draw);
    const PipelineSchedule s = random_order(o, rng, draw);
    EXPECT_EQ(verdict(s), "") << text(o);
    EXPECT_EQ(Machines(s, 1).run(), "") << text(o);
  }
}

TEST(PipelineProperty, MicroBatchesMayComeInAnyOrder) {
  const Rng rng(2, "labels");
  uint64_t draw = 0;
  for (int i = 0; i < 200; ++i) {
    const PipelineOptions o = random_options(rng, draw);
    PipelineSchedule s = build_pipeline(o);
    std::vector<int32_t> label(static_cast<size_t>(o.micro_batches));
    for (size_t k = 0; k < label.size(); ++k) label[k] = static_cast<int32_t>(k);
    for (size_t k = label.size(); k > 1; --k) std::swap(label[k - 1], label[rng.below(draw++, k)]);
    for (auto& list : s.ranks)
      for (Action& a : list) a.micro_batch = label[static_cast<size_t>(a.micro_batch)];
    EXPECT_EQ(verdict(s), "") << text(o);
  }
}

// A random place of a pipeline, and one of the list's ranks that has any action.
struct Broken {
  PipelineSchedule s;
  const Rng& rng;
  uint64_t& draw;
  size_t pick(size_t n) { return rng.below(draw++, n); }
  std::vector<Action>& any_list() { return s.ranks[pick(s.ranks.size())]; }
  // Where `kind` of some micro-batch stands in a list of some rank; none: no rank has one.
  std::pair<std::vector<Action>*, size_t> any(Kind kind) {
    std::vector<std::pair<std::vector<Action>*, size_t>> all;
    for (auto& list : s.ranks)
      for (size_t i = 0; i < list.size(); ++i)
        if (list[i].kind == kind) all.push_back({&list, i});
    if (all.empty()) return {nullptr, 0};
    return all[pick(all.size())];
  }
};

size_t place_of(const std::vector<Action>& list, const Action& a) {
  return static_cast<size_t>(std::find(list.begin(), list.end(), a) - list.begin());
}

// Each breaks a sound pipeline, or says that it has nothing to break.
const std::map<std::string, std::function<bool(Broken&)>> kFaults = {
    {"an action is gone",
     [](Broken& b) {
       auto& list = b.any_list();
       list.erase(list.begin() + static_cast<std::ptrdiff_t>(b.pick(list.size())));
       return true;
     }},
    {"an action is there twice",
     [](Broken& b) {
       auto& list = b.any_list();
       const Action a = list[b.pick(list.size())];
       list.insert(list.begin() + static_cast<std::ptrdiff_t>(b.pick(list.size() + 1)), a);
       return true;
     }},
    {"a chunk that is not there, or not the action's",
     [](Broken& b) {
       auto& list = b.any_list();
       Action& a = list[b.pick(list.size())];
       a.chunk = a.chunk == 0 ? 1 : b.pick(2) == 0 ? 0 : -1;
       return true;
     }},
    {"a micro-batch that is not there, or not the action's",
     [](Broken& b) {
       auto& list = b.any_list();
       Action& a = list[b.pick(list.size())];
       a.micro_batch += b.pick(2) == 0 ? 1 : -1;
       return true;
     }},
    {"an action of another rank",
     [](Broken& b) {
       auto& from = b.any_list();
       const size_t i = b.pick(from.size());
       auto& to = b.any_list();
       if (&to == &from) return false;
       to.push_back(from[i]);
       from.erase(from.begin() + static_cast<std::ptrdiff_t>(i));
       return true;
     }},
    {"another kind",
     [](Broken& b) {
       auto& list = b.any_list();
       Action& a = list[b.pick(list.size())];
       a.kind = static_cast<Kind>((static_cast<size_t>(a.kind) + 1 + b.pick(7)) % 8);
       return true;
     }},
    {"cause and effect change places",
     [](Broken& b) {
       const Kind input = b.s.split ? Kind::kBackwardInput : Kind::kBackward;
       const std::pair<Kind, Kind> pairs[] = {
           {Kind::kRecvForward, Kind::kForward}, {Kind::kForward, Kind::kSendForward}, {Kind::kForward, input},
           {Kind::kRecvBackward, input},         {input, Kind::kSendBackward},         {input, Kind::kBackwardWeight}};
       const auto& [cause, effect] = pairs[b.pick(6)];
       const auto [list, i] = b.any(cause);
       if (!list) return false;
       const size_t j = place_of(*list, {effect, (*list)[i].micro_batch, (*list)[i].chunk});
       if (j == list->size()) return false;
       std::swap((*list)[i], (*list)[j]);
       return true;
     }},
    {"one slot too few",
     [](Broken& b) {
       const size_t rank = b.pick(b.s.ranks.size());
       const auto chunk = static_cast<int32_t>(b.pick(static_cast<size_t>(b.s.chunks)));
       int64_t alive = 0, peak = 0;
       for (const Action& a : b.s.ranks[rank]) {
         if (a.chunk != chunk) continue;
         if (a.kind == Kind::kForward) peak = std::max(peak, ++alive);
         if (a.kind == Kind::kBackward || a.kind == Kind::kBackwardWeight) --alive;
       }
       b.s.slots[rank][static_cast<size_t>(chunk)] = peak - 1;
       return true;
     }},
    {"gradients are waited for before the activations are sent",
     [](Broken& b) {
       const auto [list, i] = b.any(Kind::kSendForward);
       if (!list) return false;
       const size_t j = place_of(*list, {Kind::kRecvBackward, (*list)[i].micro_batch, (*list)[i].chunk});
       const auto begin = list->begin();
       std::rotate(begin + static_cast<std::ptrdiff_t>(i), begin + static_cast<std::ptrdiff_t>(j),
                   begin + static_cast<std::ptrdiff_t>(j) + 1);
       return true;
     }},
    {"two sends of a way change places",
     [](Broken& b) {
       const auto [list, i] = b.any(b.pick(2) == 0 ? Kind::kSendForward : Kind::kSendBackward);
       if (!list) return false;
       for (size_t j = i + 1; j < list->size(); ++j)
         if ((*list)[j].kind == (*list)[i].kind && (*list)[j].chunk == (*list)[i].chunk) {
           std::swap((*list)[i], (*list)[j]);
           return true;
         }
       return false;
     }},
    {"joined and split mixed up",
     [](Broken& b) {
       b.s.split = !b.s.split;
       return true;
     }},
    {"a rank without its list", [](Broken& b) {
       b.s.ranks.pop_back();
       return true;
     }}};

TEST(PipelineProperty, BrokenOnesAreRefused) {
  const Rng rng(3, "faults");
  uint64_t draw = 0;
  for (const auto& [name, make] : kFaults) {
    int broken = 0;
    for (int i = 0; i < 300; ++i) {
      const PipelineOptions o = random_options(rng, draw);
      Broken b{build_pipeline(o), rng, draw};
      if (!make(b)) continue;
      ++broken;
      EXPECT_NE(verdict(b.s), "") << name << " in " << text(o);
    }
    EXPECT_GT(broken, 50) << name;
  }
}

// A few neighbours change places anywhere: the two players must agree on what is left of the pipeline. Some of these
// can still be played.
TEST(PipelineProperty, TwoPlayersAgree) {
  const Rng rng(4, "swaps");
  uint64_t draw = 0;
  int sound = 0, broken = 0;
  for (int i = 0; i < 3000; ++i) {
    PipelineSchedule s = build_pipeline(random_options(rng, draw));
    s.name = "mine";  // bound by its slots alone
    for (uint64_t n = 1 + rng.below(draw++, 3); n > 0; --n) {
      auto& list = s.ranks[rng.below(draw++, s.ranks.size())];
      const size_t k = rng.below(draw++, list.size() - 1);
      std::swap(list[k], list[k + 1]);
    }
    if (rng.below(draw++, 4) == 0) {
      auto& slots = s.slots[rng.below(draw++, s.slots.size())];
      ++slots[rng.below(draw++, slots.size())];
    }
    const std::string one = verdict(s), other = Machines(s, static_cast<uint64_t>(i)).run();
    EXPECT_EQ(one.empty(), other.empty()) << "validator: " << one << "; machines: " << other;
    ++(one.empty() ? sound : broken);
  }
  EXPECT_GT(sound, 300);
  EXPECT_GT(broken, 300);
}

}  // namespace
}  // namespace concerto
