#include "concerto/cli/generate_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/base/clock.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/model_folder.h"
#include "concerto/cli/option_checks.h"
#include "concerto/cli/text_generator.h"

namespace concerto {
namespace {

struct GenerateArguments {
  std::string model, prompt, dtype = "f32", backend = "cpu";
  GenerateOptions options;
  RunSection run;  // threads and cores
  bool chat = false, json = false;
};

void run_generate(GenerateArguments& a) {
  const std::string dir = model_folder(a.model);
  const ModelConfig m = load_model_config(dir);
  const Tokenizer tokenizer = Tokenizer::load(dir);
  std::erase_if(a.options.stop, [](const std::string& s) { return s.empty(); });
  const std::vector<int32_t> prompt = prompt_tokens(tokenizer, m, a.prompt, a.chat);
  for (int32_t id : prompt)
    if (id < 0 || id >= m.vocab_size)
      throw Error(ErrorCode::kModel, dir,
                  fmt::format("the tokenizer gives id {}, the model has {} rows", id, m.vocab_size),
                  "Use the tokenizer that the model was trained with.");
  const int64_t capacity = static_cast<int64_t>(prompt.size()) + a.options.max_tokens;
  if (capacity > m.max_position_embeddings) {
    const bool long_prompt = static_cast<int64_t>(prompt.size()) >= m.max_position_embeddings;
    throw Error(
        ErrorCode::kUsage, long_prompt ? "--prompt" : "--max-tokens",
        fmt::format("{} tokens of prompt and {} new ones are more than the model's max_position_embeddings = {}",
                    prompt.size(), a.options.max_tokens, m.max_position_embeddings),
        long_prompt
            ? "Shorten the prompt."
            : fmt::format("Ask for {} at most.", m.max_position_embeddings - static_cast<int64_t>(prompt.size())));
  }
  ThreadPool pool(a.run.threads, pinned_cores(a.run));
  const auto store = load_hf_store(dir, m, compute_dtype(a.dtype), StoreUse::kInfer);
  const Stage stage(m, *store, Recompute::kNone, capacity);
  constexpr int64_t kPromptChunk = 512;
  InferenceSession session(stage, *store, backend_by_name(a.backend), pool, capacity, kPromptChunk);
  if (!a.json && !a.chat) fmt::print("{}", a.prompt);
  const double start = steady_seconds();
  const Generated g =
      generate_text(session, tokenizer, prompt, tokenizer.eos_id(), a.options, [&](std::string_view text) {
        if (a.json) return;
        fmt::print("{}", text);
        std::fflush(stdout);
      });
  const double seconds = steady_seconds() - start;
  if (a.json)
    fmt::print("{}\n", nlohmann::json{{"prompt", a.prompt},
                                      {"text", g.text},
                                      {"prompt_tokens", g.prompt_tokens},
                                      {"new_tokens", g.new_tokens},
                                      {"finish", g.finish},
                                      {"seconds", seconds}}
                           .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    fmt::print("\n");
}

}  // namespace

void add_generate_command(CLI::App& app) {
  auto a = std::make_shared<GenerateArguments>();
  CLI::App* c = app.add_subcommand("generate", "continue a text");
  c->add_option("--model", a->model, "Hugging Face folder, or a run folder that holds one")->required();
  c->add_option("--prompt", a->prompt, "the text to continue")->required();
  c->add_flag("--chat", a->chat, "the prompt is a user's turn: render it with the chat template");
  c->add_option("--max-tokens", a->options.max_tokens, "new tokens at most")
      ->check(whole_number(1, kMostTokens))
      ->capture_default_str();
  c->add_option("--temperature", a->options.sampler.temperature, "0: greedy")
      ->check(number(0, 1e6))
      ->capture_default_str();
  c->add_option("--top-p", a->options.sampler.top_p, "draw from the likeliest tokens that reach this probability")
      ->check(number(0, 1))
      ->capture_default_str();
  c->add_option("--seed", a->options.sampler.seed, "the same seed draws the same text")->capture_default_str();
  c->add_option("--stop", a->options.stop, "end before this text; may be given several times");
  c->add_option("--dtype", a->dtype, "f32 | bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  c->add_option("--backend", a->backend, "cpu | ref")->capture_default_str();
  add_thread_options(*c, a->run);
  c->add_flag("--json", a->json, "print one JSON object at the end");
  c->callback([a] { run_generate(*a); });
}

}  // namespace concerto
