// The program: one subcommand a file. Errors end with their exit code and say what, where and how to mend it (docs/errors.md).
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>

#include "concerto/base/error.h"
#include "concerto/cli/bench_command.h"
#include "concerto/cli/checkpoint_command.h"
#include "concerto/cli/config_command.h"
#include "concerto/cli/data_command.h"
#include "concerto/cli/eval_command.h"
#include "concerto/cli/generate_command.h"
#include "concerto/cli/train_command.h"
#include "concerto/cli/verify_command.h"

int main(int argc, char** argv) {
  CLI::App app("Concerto: trains large Mixture-of-Experts language models of the ERNIE 4.5 kind.", "concerto");
  app.set_version_flag("--version", "concerto " CONCERTO_VERSION);
  app.require_subcommand(1);
  concerto::add_train_command(app);
  concerto::add_eval_command(app);
  concerto::add_generate_command(app);
  concerto::add_verify_command(app);
  concerto::add_data_command(app);
  concerto::add_checkpoint_command(app);
  concerto::add_bench_command(app);
  concerto::add_config_command(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForAllHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    app.exit(e);
    return static_cast<int>(concerto::ErrorCode::kUsage);
  } catch (const concerto::Error& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "error (%s): %s\n", concerto::error_code_name(e.code), e.what());
    return static_cast<int>(e.code);
  } catch (const std::exception& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
