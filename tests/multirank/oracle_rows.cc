#include <algorithm>
#include <numeric>

#include "tests/multirank/oracle.h"
#include "tests/support/tiny_routers.h"

namespace concerto::test {
namespace {

constexpr int kSteps = 5;

struct Kind {
  std::string name;
  std::vector<Layout> layouts;
};

Layout pipeline(const char* schedule, int pp, int vpp = 1) {
  return {.mesh = {.pp = pp}, .vpp = vpp, .schedule = schedule};
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const int zero : {0, 1, 2}) {
    Kind k{fmt::format("zero{}", zero), {}};
    for (const int dp : {2, 3, 5, 4}) k.layouts.push_back({.mesh = {.dp = dp}, .zero = zero});
    all.push_back(k);
  }
  all.push_back({"tp", {{.mesh = {.tp = 2}}, {.mesh = {.tp = 4}}}});
  for (const char* schedule : {"1f1b", "zero_bubble"})
    all.push_back({schedule, {pipeline(schedule, 2), pipeline(schedule, 3), pipeline(schedule, 5)}});
  all.push_back({"zero_bubble_v", {pipeline("zero_bubble_v", 2), pipeline("zero_bubble_v", 3)}});
  all.push_back(
      {"interleaved", {pipeline("interleaved", 2, 2), pipeline("interleaved", 3, 2), pipeline("interleaved", 2, 3)}});
  all.push_back({"ep",
                 {{.mesh = {.dp = 2, .ep = 2}},
                  {.mesh = {.dp = 3, .ep = 3}},
                  {.mesh = {.tp = 2, .ep = 2}},
                  {.mesh = {.dp = 5, .ep = 5}},
                  {.mesh = {.dp = 4, .ep = 2}},
                  {.mesh = {.tp = 4, .dp = 2, .ep = 8}}}});
  all.push_back({"etp",
                 {{.mesh = {.dp = 2, .etp = 2}},
                  {.mesh = {.tp = 2, .etp = 2}},
                  {.mesh = {.dp = 4, .ep = 2, .etp = 2}},
                  {.mesh = {.tp = 2, .dp = 2, .ep = 2, .etp = 2}},
                  {.mesh = {.dp = 3, .etp = 3}}}});
  all.push_back({"mixed",
                 {{.mesh = {.tp = 2, .dp = 2, .pp = 2, .ep = 4}, .schedule = "zero_bubble"},
                  {.mesh = {.tp = 2, .dp = 2, .pp = 2, .ep = 2, .etp = 2}, .schedule = "zero_bubble_v"},
                  {.mesh = {.dp = 2, .pp = 2, .ep = 2}, .vpp = 2, .schedule = "interleaved"},
                  {.mesh = {.tp = 4, .dp = 2, .pp = 2, .ep = 8}},
                  {.mesh = {.dp = 3, .pp = 3, .ep = 3}, .schedule = "zero_bubble_v"},
                  {.mesh = {.tp = 2, .dp = 2, .pp = 4, .ep = 2}, .zero = 0},
                  {.mesh = {.tp = 2, .dp = 2, .ep = 4}, .zero = 2, .schedule = "zero_bubble"},
                  {.mesh = {.tp = 2, .dp = 3, .pp = 2, .etp = 2}, .schedule = "zero_bubble"}}});
  return all;
}

std::vector<OracleRow> pairs() {
  std::vector<OracleRow> rows;
  const std::vector<TinyRouter> routers = tiny_routers();
  const std::vector<std::string> moe_models = {"moe", "interval2", "padded", "packed", "mtp"};
  const int micro_batches[] = {4, 1, 6, 5, 2, 3, 7};
  const Recompute recompute[] = {Recompute::kNone, Recompute::kSelective, Recompute::kFull};
  size_t k = 0;
  for (const Kind& kind : kinds()) {
    for (size_t r = 0; r <= routers.size(); ++r) {
      OracleRow row{.kind = kind.name, .model = "dense", .router = "", .layout = kind.layouts[r % kind.layouts.size()]};
      row.micro_batches = std::max(micro_batches[(r + 3 * k) % std::size(micro_batches)], row.layout.mesh.dp);
      row.layout.recompute = recompute[(r + 2 * k) % std::size(recompute)];
      if ((r + k) % 4 == 3) row.optimizer = OptimizerName::kLamb;
      if (r < routers.size()) {
        row.model = moe_models[(r + k) % moe_models.size()];
        row.router = routers[r].name;
        // In a unit of one token Sinkhorn makes all experts equal, and rounding chooses.
        if ((r + k) % 3 == 1 && !(routers[r].sinkhorn && row.model == "padded")) row.unit = RoutingUnit::kSequence;
        if ((r + k) % 3 == 2) row.unit = RoutingUnit::kGlobal;
      }
      rows.push_back(row);
    }
    ++k;
  }
  return rows;
}

const OracleRow kMoe{.kind = "extra", .model = "moe", .router = "plain_per_layer_z", .layout = {}};

OracleRow with(OracleRow row, const Layout& layout) {
  row.layout = layout;
  row.micro_batches = std::max(row.micro_batches, layout.mesh.dp);
  return row;
}

// One layout of each axis, and all axes together.
std::vector<Layout> short_list() {
  return {{.mesh = {.dp = 2}},
          {.mesh = {.tp = 2}},
          pipeline("zero_bubble_v", 2),
          {.mesh = {.dp = 2, .ep = 2}},
          {.mesh = {.tp = 2, .dp = 2, .pp = 2, .ep = 2, .etp = 2}, .schedule = "zero_bubble"}};
}

void add_extras(std::vector<OracleRow>& rows) {
  std::vector<OracleRow> variants;
  OracleRow row = kMoe;
  row.biases = true;  // of attention, MLPs, experts and the head
  variants.push_back(row);
  row = kMoe;
  row.no_targets = true;
  variants.push_back(row);
  row.router = "plain_pooled";
  variants.push_back(row);
  row = kMoe;
  row.router_steps = true;
  variants.push_back(row);
  row.router = "groups";
  row.optimizer = OptimizerName::kLamb;
  variants.push_back(row);
  row = kMoe;
  row.model = "padded";
  row.micro_batches = 3;  // uneven over two data ranks
  for (const LossAverage average : {LossAverage::kMicroBatches, LossAverage::kTokenBalance}) {
    row.average = average;
    variants.push_back(row);
  }
  row = kMoe;
  row.dtype = "f32";
  variants.push_back(row);
  row.dtype = "bf16";
  variants.push_back(row);
  for (const OracleRow& variant : variants)
    for (const Layout& layout : short_list()) rows.push_back(with(variant, layout));

  // Heads by the ranks that there are, key/value heads that several ranks share, all biases.
  row = kMoe;
  row.biases = true;
  row.heads = row.kv_heads = 3;
  rows.push_back(with(row, {.mesh = {.tp = 3}}));
  row.heads = row.kv_heads = 5;
  rows.push_back(with(row, {.mesh = {.tp = 5, .ep = 5}}));
  row.heads = 4;
  row.kv_heads = 1;
  rows.push_back(with(row, {.mesh = {.tp = 4}}));
  rows.push_back(with(row, {.mesh = {.tp = 2, .dp = 2, .pp = 2}}));
  row.optimizer = OptimizerName::kLamb;
  row.kv_heads = 2;
  rows.push_back(with(row, {.mesh = {.tp = 4, .dp = 2, .ep = 2}}));
  // Tied head with its bias on the last stage.
  row = kMoe;
  row.model = "tied";
  row.biases = true;
  rows.push_back(with(row, pipeline("1f1b", 3)));
  rows.push_back(with(row, {.mesh = {.tp = 2, .dp = 2, .pp = 2}}));
  // Fewer tokens than ranks.
  row = kMoe;
  row.model = "short";
  rows.push_back(with(row, {.mesh = {.tp = 4}}));
  rows.push_back(with(row, {.mesh = {.tp = 4, .ep = 4}}));
  rows.push_back(with(row, {.mesh = {.tp = 4, .dp = 2, .pp = 2, .ep = 4, .etp = 2}, .recompute = Recompute::kFull}));
}

ModelConfig model_of(const OracleRow& row, RoutingOptions& options) {
  ModelConfig m = tiny_dense();
  for (const TinyRouter& r : tiny_routers())
    if (row.router == r.name) {
      m = r.config;
      options = r.options;
    }
  if (row.model == "interval2") {
    m.num_hidden_layers = 5;
    m.moe_layer_start_index = 1;
    m.moe_layer_interval = 2;
  }
  if (row.model == "mtp") m.num_nextn_predict_layers = 2;
  if (row.model == "tied") m.tie_word_embeddings = true;
  m.use_bias = row.biases;
  m.num_attention_heads = row.heads;
  m.num_key_value_heads = row.kv_heads;
  // At the usual temperature a token that is most of what two experts get gives both the same: in units of so few tokens
  // rounding would choose.
  m.sinkhorn_temp = 0.5;
  if (row.dtype == "bf16") m.moe_k = m.moe_num_experts;  // no choice that rounding could flip
  if (row.router_steps) {
    m.moe_orthogonal_loss_lambda = 0.5;
    m.moe_router_bias_update_rate = 0.01;
  }
  return m;
}

// The rows of each micro-batch, in turn.
std::vector<Rows> shapes_of(const std::string& model) {
  if (model == "padded") return {{{6}, {2}}, {{5}, {1}}, {{3}, {6}}};
  if (model == "packed") return {{{2, 4}, {1, 3, 2}}, {{5, 1}, {6}}};
  if (model == "short") return {{{1}}, {{2}, {1}}, {{1}, {1}}};
  return {{{6}, {6}}};
}

}  // namespace

std::string OracleRow::name() const {
  std::string text = fmt::format("{} {} {} m{}", model, router.empty() ? "-" : router, layout.name(), micro_batches);
  if (optimizer == OptimizerName::kLamb) text += " lamb";
  if (unit != RoutingUnit::kMicroBatch) text += unit == RoutingUnit::kGlobal ? " global" : " sequence";
  if (average != LossAverage::kTokens)
    text += average == LossAverage::kMicroBatches ? " micro_batches" : " token_balance";
  if (dtype != "f64") text += " " + dtype;
  if (biases) text += " biases";
  if (no_targets) text += " no_targets";
  if (router_steps) text += " router_steps";
  if (heads != 4 || kv_heads != 2) text += fmt::format(" heads {}/{}", heads, kv_heads);
  return text;
}

bool OracleRow::exact() const {
  RoutingOptions options;
  const ModelConfig m = model_of(*this, options);
  const bool two_read_the_embedding = layout.mesh.pp > 1 && (m.tie_word_embeddings || m.num_nextn_predict_layers > 0);
  return layout.mesh.tp == 1 && layout.mesh.dp == 1 && !two_read_the_embedding;
}

Job OracleRow::job() const {
  RoutingOptions options;
  const ModelConfig m = model_of(*this, options);
  const std::vector<Rows> shapes = shapes_of(model);
  int64_t rows = 0, seq = 0;
  for (const Rows& shape : shapes) {
    rows = std::max(rows, static_cast<int64_t>(shape.size()));
    for (const auto& r : shape) seq = std::max<int64_t>(seq, std::accumulate(r.begin(), r.end(), 0));
  }
  Job job{.config = parallel_config(m, dtype, micro_batches, rows, seq), .steps = {}};
  TrainingSection& t = job.config.training;
  t.balance_loss = options.balance_loss;
  t.balance_counts = options.balance_counts;
  t.routing_unit = unit;
  t.loss_average = average;
  if (average == LossAverage::kTokenBalance) t.token_balance_seqlen = 4;
  job.config.optimizer.name = optimizer;
  // Where an element's gradient is rounding alone, AdamW would make a step of it: not below this eps.
  job.config.optimizer.eps = dtype == "f64" ? 1e-6 : 1e-2;
  for (int s = 0; s < kSteps; ++s) {
    job.steps.emplace_back();
    for (int b = 0; b < micro_batches; ++b) {
      job.steps.back().push_back(
          random_batch(m, shapes[static_cast<size_t>(b) % shapes.size()], static_cast<uint64_t>(100 * s + b)));
      MicroBatch& made = job.steps.back().back();
      if (no_targets) std::fill(made.targets.begin(), made.targets.end(), kIgnoreIndex);
    }
  }
  return job;
}

std::vector<OracleRow> oracle_rows() {
  std::vector<OracleRow> rows = pairs();
  add_extras(rows);
  return rows;
}

const std::vector<std::string>& oracle_kinds() {
  static const std::vector<std::string> names = {"zero0",         "zero1",       "tp", "1f1b", "zero_bubble",
                                                 "zero_bubble_v", "interleaved", "ep", "etp",  "mixed"};
  return names;
}

const std::vector<std::string>& oracle_models() {
  static const std::vector<std::string> names = {"dense", "moe", "interval2", "padded", "packed", "mtp"};
  return names;
}

}  // namespace concerto::test
