#include "concerto/cli/layout_view.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "concerto/cli/backends.h"
#include "concerto/topology/mesh_svg.h"
#include "concerto/train/human_units.h"
#include "concerto/train/rank_work.h"
#include "concerto/train/step_engine.h"

namespace concerto {
namespace {

struct Layout {
  Layout(const RunConfig& c, const MeshSizes& sizes)
      : config(c), mesh(sizes), schedule(step_schedule(c, sizes)), packs(backend_by_name(c.backend).linear.packing) {}

  RankWork work(int rank) const { return rank_work(config, mesh.sizes(), mesh.place(rank), schedule, packs); }

  const RunConfig& config;
  Mesh mesh;
  PipelineSchedule schedule;
  bool packs;
};

// Ascending numbers: "0-3, 8".
std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0, end; i < numbers.size(); i = end) {
    for (end = i + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) ++end;
    text += text.empty() ? "" : ",";
    text += end - i > 1 ? fmt::format("{}-{}", numbers[i], numbers[end - 1]) : fmt::format("{}", numbers[i]);
  }
  return text.empty() ? "none" : text;
}

std::string span_text(const StageSpan& s) {
  const int64_t n = s.last_layer - s.first_layer;
  return n == 0   ? "none"
         : n == 1 ? fmt::format("{}", s.first_layer)
                  : fmt::format("{}-{}", s.first_layer, s.last_layer - 1);
}

// "layers 0-3 and 12-15, embedding, head"
std::string stage_title(const std::vector<StageSpan>& spans, const ModelConfig& m) {
  std::vector<std::string> layers;
  bool embedding = false, head = false;
  for (const StageSpan& s : spans) {
    layers.push_back(span_text(s));
    embedding |= s.embedding;
    head |= s.head;
  }
  std::string text = fmt::format("layers {}", fmt::join(layers, " and "));
  if (embedding) text += ", embedding";
  if (head) text += m.num_nextn_predict_layers > 0 ? ", head, multi-token prediction" : ", head";
  return text;
}

std::vector<std::string> stage_titles(const Layout& l) {
  std::vector<std::string> titles;
  for (int p = 0; p < l.schedule.pp; ++p)
    titles.push_back(stage_title(l.work(l.mesh.rank(p, 0, 0)).plan.stages, l.config.model.config));
  return titles;
}

int64_t sent_bytes(const LayoutCost& c) {
  return c.tp_gather_bytes + c.tp_reduce_scatter_bytes + c.dispatch_bytes + c.pipeline_bytes +
         c.reduce_to_owners_bytes + c.broadcast_bytes;
}
int64_t held_bytes(const LayoutCost& c) { return c.weight_bytes + c.copy_bytes + c.gradient_bytes + c.moment_bytes; }

// None on a stage without MoE layers.
std::vector<int> experts_of(const ModelConfig& m, const ShardPlan& plan) {
  for (const StageSpan& s : plan.stages)
    for (int64_t i = s.first_layer; i < s.last_layer; ++i)
      if (m.is_moe_layer(i)) return local_experts(m, plan, plan.ep_rank);
  return {};
}

// One that stands for "rank" in a table: the axes that are there.
std::vector<std::pair<const char*, int>> axes(const MeshSizes& s, const MeshPlace& p) {
  std::vector<std::pair<const char*, int>> all;
  for (const auto& [name, size, at] : {std::tuple{"pp", s.pp, p.pp},
                                       {"dp", s.dp, p.dp},
                                       {"tp", s.tp, p.tp},
                                       {"edp", s.ep * s.etp > 1 ? s.edp() : 1, p.edp},
                                       {"ep", s.ep, p.ep},
                                       {"etp", s.etp, p.etp}})
    if (size > 1) all.emplace_back(name, at);
  return all;
}

using Row = std::vector<std::string>;

// Columns as wide as their widest cell, to the right.
std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const Row& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) text += fmt::format("{}{:>{}}", i ? "  " : "", row[i], widths[i]);
    text += "\n";
  }
  return text;
}

std::string heading(const Layout& l) {
  const MeshSizes& s = l.mesh.sizes();
  const RunConfig& c = l.config;
  std::string text =
      fmt::format("{} rank{}: tp {} x dp {} x pp {}", s.world(), s.world() == 1 ? "" : "s", s.tp, s.dp, s.pp);
  if (c.model.config.num_moe_layers() > 0)
    text += fmt::format("; experts of a stage: etp {} x ep {} x edp {}", s.etp, s.ep, s.edp());
  text += fmt::format("\nschedule {}, ZeRO {}, recompute {}; micro-batches a step: {}, of the first data rank: {}\n",
                      c.parallel.schedule, c.parallel.zero,
                      c.parallel.recompute == Recompute::kNone   ? "none"
                      : c.parallel.recompute == Recompute::kFull ? "full"
                                                                 : "selective",
                      micro_batches(c.training), l.schedule.micro_batches);
  return text;
}

}  // namespace

int64_t least_ranks(const ParallelSection& p) {
  const int64_t experts = p.ep * p.etp;
  return p.pp * p.tp * (experts / std::gcd(experts, p.tp));
}

std::string layout_report(const RunConfig& config, const MeshSizes& sizes) {
  const Layout l(config, sizes);
  const ModelConfig& m = config.model.config;
  const std::vector<std::string> titles = stage_titles(l);
  std::string text = heading(l) + "\n";
  for (size_t p = 0; p < titles.size(); ++p)
    text += titles.size() > 1 ? fmt::format("pp {}: {}\n", p, titles[p]) : titles[p] + "\n";
  std::vector<Row> rows = {{"rank"}};
  for (int r = 0; r < sizes.world(); ++r) {
    const RankWork work = l.work(r);
    const LayoutCost cost = layout_cost(m, work);
    rows.push_back({fmt::format("{}", r)});
    Row& row = rows.back();
    const auto add = [&](const char* name, std::string value) {
      if (r == 0) rows[0].emplace_back(name);
      row.push_back(std::move(value));
    };
    for (const auto& [name, at] : axes(sizes, l.mesh.place(r))) add(name, fmt::format("{}", at));
    if (m.num_moe_layers() > 0) add("experts", ranges(experts_of(m, work.plan)));
    add("weights", format_bytes(cost.weight_bytes + cost.copy_bytes));
    add("gradients", format_bytes(cost.gradient_bytes));
    add("optimizer", format_bytes(cost.moment_bytes));
    add("together", format_bytes(held_bytes(cost)));
    add("FLOPs/step", format_count(cost.product_flops()));
    if (sizes.world() > 1) add("sent/step", format_bytes(sent_bytes(cost)));
  }
  return text + "\n" + table(rows) +
         "\nBytes are those of the run's state, without activations. FLOPs are those of products; they and bytes sent "
         "hold "
         "for\nfull micro-batches and evenly loaded experts.\n";
}

nlohmann::json layout_json(const RunConfig& config, const MeshSizes& sizes) {
  const Layout l(config, sizes);
  const ModelConfig& m = config.model.config;
  nlohmann::json ranks = nlohmann::json::array();
  for (int r = 0; r < sizes.world(); ++r) {
    const RankWork work = l.work(r);
    const LayoutCost cost = layout_cost(m, work);
    const MeshPlace at = l.mesh.place(r);
    nlohmann::json stages = nlohmann::json::array();
    for (const StageSpan& s : work.plan.stages)
      stages.push_back({{"first_layer", s.first_layer},
                        {"layers", s.last_layer - s.first_layer},
                        {"embedding", s.embedding},
                        {"head", s.head}});
    ranks.push_back({{"rank", r},
                     {"pp", at.pp},
                     {"dp", at.dp},
                     {"tp", at.tp},
                     {"edp", at.edp},
                     {"ep", at.ep},
                     {"etp", at.etp},
                     {"stages", stages},
                     {"experts", experts_of(m, work.plan)},
                     {"weight_bytes", cost.weight_bytes},
                     {"copy_bytes", cost.copy_bytes},
                     {"gradient_bytes", cost.gradient_bytes},
                     {"moment_bytes", cost.moment_bytes},
                     {"product_flops", cost.product_flops()},
                     {"sent_bytes",
                      {{"tp_gather", cost.tp_gather_bytes},
                       {"tp_reduce_scatter", cost.tp_reduce_scatter_bytes},
                       {"dispatch", cost.dispatch_bytes},
                       {"pipeline", cost.pipeline_bytes},
                       {"gradients", cost.reduce_to_owners_bytes},
                       {"broadcast", cost.broadcast_bytes}}}});
  }
  return {{"ranks", sizes.world()},
          {"sizes",
           {{"tp", sizes.tp},
            {"dp", sizes.dp},
            {"pp", sizes.pp},
            {"ep", sizes.ep},
            {"etp", sizes.etp},
            {"edp", sizes.edp()}}},
          {"layout", ranks}};
}

std::string layout_svg(const RunConfig& config, const MeshSizes& sizes) {
  const Layout l(config, sizes);
  return mesh_svg(l.mesh, stage_titles(l));
}

}  // namespace concerto
