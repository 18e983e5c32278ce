#include "concerto/cli/program.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "concerto/base/error.h"
#include "concerto/cli/bench_command.h"
#include "concerto/cli/checkpoint_command.h"
#include "concerto/cli/config_command.h"
#include "concerto/cli/data_command.h"
#include "concerto/cli/eval_command.h"
#include "concerto/cli/generate_command.h"
#include "concerto/cli/inspect_command.h"
#include "concerto/cli/job_error.h"
#include "concerto/cli/launch_command.h"
#include "concerto/cli/train_command.h"
#include "concerto/cli/verify_command.h"
#include "concerto/config/faults.h"

namespace concerto {
namespace {

constexpr int kBugExit = 1;

int report(const char* kind, int exit_code, const Error& e, bool json) {
  std::fflush(stdout);
  std::fprintf(stderr, "error (%s): %s\n", kind, e.what());
  if (json) {
    std::string fix = e.fix;
    if (fix.starts_with('\n')) fix.erase(0, 1);  // the line of its own that it has in the text
    const nlohmann::ordered_json line{{"error", kind}, {"where", e.where}, {"what", e.problem}, {"fix", fix}};
    const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    std::fwrite(text.data(), 1, text.size(), stdout);  // not fmt::print, which throws where nobody reads
    std::fflush(stdout);
  }
  return exit_code;
}

int report(const Error& e, bool json) { return report(error_code_name(e.code), static_cast<int>(e.code), e, json); }

int report_bug(const char* what, bool json) {
  return report("bug", kBugExit, Error(ErrorCode::kUsage, "", what, "Please report it."), json);
}

// What the parser found wrong with the command line, of the innermost command that was named.
Error usage_error(const CLI::App& app, const CLI::ParseError& parse) {
  const CLI::App* command = &app;
  std::string name = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    name += " " + command->get_name();
  }
  const std::string help = fmt::format("Run `{} --help`.", name);
  std::vector<std::string> commands, options;
  for (const CLI::App* sub : command->get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(sub->get_name());
  for (const CLI::Option* option : command->get_options())
    for (const std::string& spelling : option->get_lnames()) options.push_back("--" + spelling);

  const std::vector<std::string> left = command->remaining();
  if (!left.empty() && !command->get_allow_extras()) {
    const std::string& word = left.front();
    const bool is_option = word.starts_with('-');
    const std::string near = nearest_name(word.substr(0, word.find('=')), is_option ? options : commands);
    return Error(ErrorCode::kUsage, name,
                 is_option          ? fmt::format("there is no option {}", word)
                 : commands.empty() ? fmt::format("there is no place for '{}'", word)
                                    : fmt::format("there is no command '{}'", word),
                 near.empty() ? help : fmt::format("Did you mean {}?", near));
  }
  if (!commands.empty() && command->get_subcommands().empty())
    return Error(ErrorCode::kUsage, name, fmt::format("a command is wanted: {}", fmt::join(commands, ", ")), help);
  return Error(ErrorCode::kUsage, name, parse.what(), help);
}

// Standard output that took less than it was given: a full disk, or a reader that is gone.
Error output_error(int reason) {
  const char* fix = reason == EPIPE   ? "Whoever read it is gone: send it to a file."
                    : reason == EBADF ? "It is closed: send it to a file."
                                      : "Free space on the disk, or send it elsewhere.";
  return Error(ErrorCode::kIo, "standard output",
               reason == 0 ? std::string("a part of it could not be written")
                           : fmt::format("cannot be written: {}", std::generic_category().message(reason)),
               fix);
}

}  // namespace

void hold_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) == -1) [[maybe_unused]]
      const int lowest = ::open("/dev/null", O_RDONLY);  // is `fd`; writing to it fails, as it should
}

void add_commands(CLI::App& app) {
  add_train_command(app);
  add_launch_command(app);
  add_eval_command(app);
  add_generate_command(app);
  add_verify_command(app);
  add_data_command(app);
  add_checkpoint_command(app);
  add_bench_command(app);
  add_inspect_command(app);
  add_config_command(app);
}

int run_program(int argc, const char* const* argv) {
  const bool json = std::any_of(argv, argv + argc, [](const char* a) { return std::string_view(a) == "--json"; });
  CLI::App app("Concerto: trains large Mixture-of-Experts language models of the ERNIE 4.5 kind.", "concerto");
  try {
    app.set_version_flag("--version", "concerto " CONCERTO_VERSION);
    app.require_subcommand(1);
    add_commands(app);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      if (e.get_exit_code() != 0) return report(usage_error(app, e), json);
      app.exit(e);  // --help and --version
    }
    errno = 0;
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return report(output_error(errno), false);
    return 0;
  } catch (const QuietEnd& e) {
    return e.exit_code;
  } catch (const JobError& e) {
    return report(error_code_name(e.code), e.exit_code, e, json);
  } catch (const Error& e) {
    return report(e, json);
  } catch (const std::bad_alloc&) {
    return report(Error(ErrorCode::kMemory, "memory", "there is not enough",
                        "Use a smaller model, batch or sequence, or a machine with more memory."),
                  json);
  } catch (const std::length_error&) {
    return report(Error(ErrorCode::kMemory, "memory", "more was wanted than can be addressed",
                        "Use a smaller model, batch or sequence."),
                  json);
  } catch (const Bug& e) {
    return report_bug(e.what(), json);
  } catch (const std::system_error& e) {
    if (std::ferror(stdout) != 0) return report(output_error(e.code().value()), false);
    return report(Error(ErrorCode::kIo, "system", e.what()), json);
  } catch (const std::exception& e) {
    return report_bug(fmt::format("unexpected {}", e.what()).c_str(), json);
  }
}

}  // namespace concerto
