#include "concerto/topology/layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <tuple>

#include "concerto/base/error.h"
#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) all.push_back(d);
  return all;
}

bool whole_pipelines(const ParallelSection& p, int ranks) { return ranks % (p.tp * p.pp) == 0; }
int64_t data_ranks(const ParallelSection& p, int ranks) { return ranks / (p.tp * p.pp); }

bool folds(const ParallelSection& p, int ranks) { return p.tp * data_ranks(p, ranks) % (p.ep * p.etp) == 0; }

bool feeds_data_ranks(const RunConfig& c, int ranks) {
  return data_ranks(c.parallel, ranks) <= micro_batches(c.training);
}

// The largest micro-batches that give each data rank one; 0: there are not even enough sequences.
int64_t feeding_micro_batch_size(const TrainingSection& t, int64_t dp) {
  return dp > t.global_batch_size ? 0 : (t.global_batch_size - 1) / (dp - 1);
}

std::string unfed(const RunConfig& c, int ranks) {
  const TrainingSection& t = c.training;
  const int64_t dp = data_ranks(c.parallel, ranks), size = feeding_micro_batch_size(t, dp);
  return fmt::format(
      "training.micro_batch_size: {} data parallel ranks, but a step of {} sequences has {} micro-batches of {}; {}",
      dp, t.global_batch_size, micro_batches(t), t.micro_batch_size,
      size ? fmt::format("with micro_batch_size {} it would have {}", size, (t.global_batch_size + size - 1) / size)
           : "global_batch_size is too small for them");
}

bool works(const RunConfig& c, int ranks) {
  return whole_pipelines(c.parallel, ranks) && folds(c.parallel, ranks) && feeds_data_ranks(c, ranks) &&
         std::all_of(parallel_rules().begin(), parallel_rules().end(),
                     [&](const Rule<RunConfig>& rule) { return rule.holds(c); });
}

double ratio(int64_t a, int64_t b) { return static_cast<double>(std::max(a, b)) / static_cast<double>(std::min(a, b)); }

// A changed setting that is no size counts like a size that changes by half.
double distance(const ParallelSection& a, const ParallelSection& b) {
  double d = ratio(a.tp, b.tp) * ratio(a.pp, b.pp) * ratio(a.ep, b.ep) * ratio(a.etp, b.etp) * ratio(a.vpp, b.vpp);
  for (const bool changed : {a.zero != b.zero, a.cp != b.cp, a.stage_layers != b.stage_layers})
    if (changed) d *= 1.5;
  return d;
}

// The asked layout with other sizes; what the sizes rule out is changed to what always works.
std::vector<ParallelSection> candidates(const ParallelSection& asked, int ranks) {
  std::vector<ParallelSection> all;
  ParallelSection p = asked;
  p.cp = 1;
  for (const int64_t tp : divisors(ranks))
    for (const int64_t pp : divisors(ranks / tp)) {
      p.tp = tp;
      p.pp = pp;
      p.zero = pp > 1 ? std::min<int64_t>(asked.zero, 1) : asked.zero;
      p.vpp = asked.schedule == "interleaved" ? std::max<int64_t>(asked.vpp, pp > 1 ? 2 : 1) : 1;
      const bool same_stages = virtual_stages(p) == static_cast<int64_t>(asked.stage_layers.size());
      p.stage_layers = same_stages ? asked.stage_layers : std::vector<int64_t>{};
      for (const int64_t ep : divisors(ranks / pp))
        for (const int64_t etp : divisors(ranks / pp / ep)) {
          p.ep = ep;
          p.etp = etp;
          all.push_back(p);
          if (!p.stage_layers.empty()) {  // numbers that do not sum to the model's layers
            all.push_back(p);
            all.back().stage_layers.clear();
          }
        }
    }
  return all;
}

// The nearest multiples of tp * pp below and above on which the layout works as written.
std::vector<int> nearest_ranks(const RunConfig& c, int ranks) {
  const int64_t step = c.parallel.tp * c.parallel.pp, most = step * micro_batches(c.training);
  std::vector<int> found;
  for (int64_t r = (ranks - 1) / step * step; r > 0 && found.empty(); r -= step)
    if (works(c, static_cast<int>(r))) found.push_back(static_cast<int>(r));
  const size_t below = found.size();
  for (int64_t r = (ranks / step + 1) * step; r <= std::min<int64_t>(most, 8 * int64_t{ranks} + step * c.parallel.ep);
       r += step)
    if (found.size() == below && works(c, static_cast<int>(r))) found.push_back(static_cast<int>(r));
  return found;
}

}  // namespace

std::vector<std::string> layout_faults(const RunConfig& c, int ranks) {
  CHECK(ranks > 0, "{} ranks", ranks);
  const ParallelSection& p = c.parallel;
  std::vector<std::string> faults;
  for (const Rule<RunConfig>& rule : parallel_rules())
    if (!rule.holds(c)) faults.push_back(fmt::format("{}: {}. {}", rule.keys[0], rule.got(c), rule.fix));
  if (!whole_pipelines(p, ranks)) {
    faults.push_back(fmt::format("parallel.tp: tp {} x pp {} = {} does not divide {} rank{}", p.tp, p.pp, p.tp * p.pp,
                                 ranks, ranks == 1 ? "" : "s"));
    return faults;  // there is no dp to speak of
  }
  if (!folds(p, ranks))
    faults.push_back(
        fmt::format("parallel.ep: ep {} x etp {} = {} does not divide the {} ranks of a pipeline stage (tp {} x dp {})",
                    p.ep, p.etp, p.ep * p.etp, p.tp * data_ranks(p, ranks), p.tp, data_ranks(p, ranks)));
  if (!feeds_data_ranks(c, ranks)) faults.push_back(unfed(c, ranks));
  return faults;
}

std::vector<ParallelSection> nearest_layouts(const RunConfig& config, int ranks, size_t most) {
  std::vector<ParallelSection> all = candidates(config.parallel, ranks);
  const auto key = [&](const ParallelSection& p) {
    return std::tuple(distance(p, config.parallel), p.pp, p.tp, p.ep, p.etp);
  };
  std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  std::vector<ParallelSection> found;
  RunConfig c = config;
  for (const ParallelSection& p : all) {
    if (found.size() == most) break;
    c.parallel = p;
    if (works(c, ranks)) found.push_back(p);
  }
  return found;
}

std::string layout_text(const ParallelSection& p, const ParallelSection& asked, int ranks) {
  std::string text = fmt::format("tp: {}, pp: {}, ep: {}", p.tp, p.pp, p.ep);
  if (p.etp != 1 || asked.etp != 1) text += fmt::format(", etp: {}", p.etp);
  if (p.vpp != asked.vpp) text += fmt::format(", vpp: {}", p.vpp);
  if (p.cp != asked.cp) text += fmt::format(", cp: {}", p.cp);
  if (p.zero != asked.zero) text += fmt::format(", zero: {}", p.zero);
  if (p.stage_layers != asked.stage_layers) text += ", stage_layers: []";
  return fmt::format("{} (dp {})", text, data_ranks(p, ranks));
}

MeshSizes resolve_layout(const RunConfig& config, int ranks) {
  const ParallelSection& p = config.parallel;
  const std::vector<std::string> faults = layout_faults(config, ranks);
  if (faults.empty())
    return {.tp = static_cast<int>(p.tp),
            .dp = static_cast<int>(data_ranks(p, ranks)),
            .pp = static_cast<int>(p.pp),
            .ep = static_cast<int>(p.ep),
            .etp = static_cast<int>(p.etp)};
  std::string fix = "\n  Nearest layouts that work here:";
  for (const ParallelSection& near : nearest_layouts(config, ranks))
    fix += fmt::format("\n    {}", layout_text(near, p, ranks));
  if (const std::vector<int> others = nearest_ranks(config, ranks); !others.empty())
    fix += fmt::format("\n  As written it works on {} ranks.", fmt::join(others, " or "));
  throw Error(ErrorCode::kConfig, "parallel",
              fmt::format("this layout cannot work on {} rank{}:\n    {}", ranks, ranks == 1 ? "" : "s",
                          fmt::join(faults, "\n    ")),
              fix);
}

}  // namespace concerto
