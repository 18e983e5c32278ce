#include "concerto/cli/train_command.h"

#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/base/cores.h"
#include "concerto/base/part.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/job_error.h"
#include "concerto/cli/overrides.h"
#include "concerto/cli/rank_agreement.h"
#include "concerto/cli/rank_guard.h"
#include "concerto/cli/text_generator.h"
#include "concerto/comm/action_log.h"
#include "concerto/comm/mpi/mpi_world.h"
#include "concerto/topology/layout.h"
#include "concerto/train/signals.h"
#include "concerto/train/trainer.h"

namespace concerto {
namespace {

// A tokenizer with ids that the model has no row for would fail far from here. No tokenizer at all is fine: data may be
// packed elsewhere.
std::unique_ptr<Tokenizer> load_tokenizer(const RunConfig& c) {
  const bool wanted = !c.data.tokenizer.empty() || !c.monitor.sample_prompt.empty();
  if (!wanted) return nullptr;
  auto tokenizer =
      std::make_unique<Tokenizer>(Tokenizer::load(c.data.tokenizer.empty() ? c.model.path : c.data.tokenizer));
  if (tokenizer->vocab_size() > c.model.config.vocab_size)
    throw Error(
        ErrorCode::kConfig, "model.vocab_size",
        fmt::format("is {}, the tokenizer has ids up to {}", c.model.config.vocab_size, tokenizer->vocab_size() - 1),
        fmt::format("Set it to at least {}.", tokenizer->vocab_size()));
  return tokenizer;
}

void print_sample(Trainer& trainer, const RunConfig& c, const Tokenizer& tokenizer, const Backend& backend,
                  ThreadPool& pool, std::FILE* screen) {
  const ModelConfig& m = c.model.config;
  const std::vector<int32_t> prompt = prompt_tokens(tokenizer, m, c.monitor.sample_prompt, false);
  const int64_t capacity =
      std::min(static_cast<int64_t>(prompt.size()) + c.monitor.sample_tokens, m.max_position_embeddings);
  if (static_cast<int64_t>(prompt.size()) >= capacity)
    return trainer.log("no sample: monitor.sample_prompt is longer than max_position_embeddings");
  const Stage stage(m, trainer.engine().store(), Recompute::kNone, capacity);
  InferenceSession session(stage, trainer.engine().store(), backend, pool, capacity, capacity);
  fmt::print(screen, "\nsample    {}", c.monitor.sample_prompt);
  const Generated sample = generate_text(session, tokenizer, prompt, tokenizer.eos_id(),
                                         {.max_tokens = c.monitor.sample_tokens,
                                          .stop = {},
                                          .sampler = {.temperature = 0.7, .seed = static_cast<uint64_t>(c.run.seed)},
                                          .cut = [] { return StopSignals::requested() != 0; }},
                                         [screen](std::string_view text) {
                                           fmt::print(screen, "{}", text);
                                           std::fflush(screen);
                                         });
  fmt::print(screen, "{}\n", sample.finish == "cut" ? " ... (cut off)" : "");
}

void print_json(const RunSummary& s) {
  nlohmann::json line{{"run_dir", s.run_dir},
                      {"step", s.step},
                      {"final_loss", s.final_loss},
                      {"tokens", s.tokens},
                      {"seconds", s.seconds},
                      {"peak_bytes", s.memory.peak_bytes},
                      {"predicted_peak_bytes", s.memory.predicted_peak_bytes()},
                      {"stopped_by", s.stopped_by}};
  line["best_valid_loss"] = s.best_valid_loss ? nlohmann::json(*s.best_valid_loss) : nlohmann::json();
  fmt::print("{}\n", line.dump());
}

struct CloseFile {
  void operator()(std::FILE* f) const { std::fclose(f); }
};

}  // namespace

RankThreads rank_threads(const RunConfig& config, const MachineShare& share) {
  std::vector<int> cores = pinned_cores(config.run);
  if (!cores.empty()) {
    check_cores(cores);
    const Part mine = part_of(static_cast<int64_t>(cores.size()), share.ranks, share.index);
    if (mine.count == 0)
      throw Error(ErrorCode::kConfig, "run.cores",
                  fmt::format("{} cores are too few for {} ranks of one machine", cores.size(), share.ranks),
                  "Give each rank one, or leave it out.");
    cores = {cores.begin() + mine.begin, cores.begin() + mine.end()};
  }
  const int wanted = config.run.threads > 0 ? config.run.threads
                     : !cores.empty()       ? static_cast<int>(cores.size())
                                            : std::max(1, usable_cores() / share.ranks);
  return {wanted, cores};
}

void train_rank(const RunConfig& config, Communicator* world, const RankThreads& threads, bool json) {
  const Backend& backend = backend_by_name(config.backend);
  const MeshSizes sizes = resolve_layout(config, world ? world->size() : 1);
  std::unique_ptr<RankGroups> groups;
  std::unique_ptr<ActionLog> actions;
  if (const char* folder = std::getenv(kJobFolderVariable); world && folder)
    actions = std::make_unique<ActionLog>(folder, world->rank(), Mesh(sizes).describe(world->rank()));
  const ActionLogScope log(actions.get());
  if (world)
    groups = std::make_unique<RankGroups>(*world, sizes, kv_sharers(config.model.config, sizes.tp),
                                          step_schedule(config, sizes).chunks);
  const bool leads = !world || world->rank() == 0;
  const std::unique_ptr<std::FILE, CloseFile> nowhere(leads ? nullptr : std::fopen("/dev/null", "w"));
  std::FILE* screen = !leads ? nowhere.get() : json ? stderr : stdout;  // standard output is then all JSON
  CHECK(screen, "/dev/null cannot be opened");
  ThreadPool pool(threads.count, threads.cores);
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(config);
  Trainer trainer(config, backend, pool, detect_terminal(::fileno(screen)), screen, groups.get());
  const RunSummary s = trainer.run();
  StopSignals::set(StopMeans::kCut);
  if (!leads) return;
  if (tokenizer && !config.monitor.sample_prompt.empty() && s.stopped_by.empty()) {
    if (world)
      trainer.log(fmt::format("sample    concerto generate --model {}/model --prompt \"{}\"", s.run_dir,
                              config.monitor.sample_prompt));
    else
      print_sample(trainer, config, *tokenizer, backend, pool, screen);
  }
  if (json) print_json(s);
  if (!s.unsaved.empty())
    throw Error(ErrorCode::kIo, s.run_dir, s.unsaved,
                "Free space, then run the same command: it goes on from the last checkpoint.");
}

namespace {

void tell_notes(const RunConfig& config) {
  for (const std::string& note : config.notes) fmt::print(stderr, "note: {}\n", note);
}

// As a rank that mpirun or srun has started.
void train_over_mpi(const std::string& path, const std::vector<std::string>& rest, bool json) {
  std::unique_ptr<RunConfig> config;
  std::exception_ptr fault;
  MpiOptions options;
  try {
    config = std::make_unique<RunConfig>(load_run_config(path, parse_overrides(rest)));
    options.deadline_seconds = config->parallel.timeout_minutes * 60;
  } catch (const Error&) {
    fault = std::current_exception();
  }
  try {
    run_mpi_rank(
        [&](Communicator& world) {
          agree_on_start(world, fault);
          if (world.rank() == 0 && !std::getenv(kJobFolderVariable)) tell_notes(*config);  // the supervisor has
          check_same_job(world, program_identity(), shared_settings(*config));
          const RankThreads threads = rank_threads(*config, machine_share(world));
          train_rank(*config, world.size() > 1 ? &world : nullptr, threads, json);
        },
        options);
  } catch (const PeerError& e) {
    throw QuietEnd{static_cast<int>(e.code)};  // the one that ended the job speaks
  }
}

void run_train(const std::string& path, const std::vector<std::string>& rest, bool json) {
  const StartedRank started = started_rank();
  if (const char* folder = std::getenv(kJobFolderVariable); folder && started.ranks > 1)
    guard_rank(folder, started.rank);
  const StopSignals signals(StopMeans::kQuit);
  ::signal(SIGPIPE, SIG_IGN);  // whoever reads the progress may leave; the run goes on
  if (started.ranks > 1 || started_by_mpi()) return train_over_mpi(path, rest, json);
  const RunConfig config = load_run_config(path, parse_overrides(rest));
  tell_notes(config);
  train_rank(config, nullptr, {config.run.threads, pinned_cores(config.run)}, json);
}

}  // namespace

void add_train_command(CLI::App& app) {
  CLI::App* c =
      app.add_subcommand("train", "train a model as a config says; also as a rank that mpirun or srun starts");
  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  c->add_option("CONFIG", *path, "a YAML or JSON config; --section.key=value behind it overrides a setting")
      ->required();
  c->add_flag("--json", *json, "print the result as one JSON object; what else is shown goes to standard error");
  c->allow_extras();
  c->callback([c, path, json] { run_train(*path, c->remaining(), *json); });
}

}  // namespace concerto
