#include "concerto/cli/inspect_command.h"

#include <CLI/CLI.hpp>

namespace concerto {

void add_inspect_command(CLI::App& app) {
  CLI::App* inspect = app.add_subcommand("inspect", "look into what a run did");
  inspect->require_subcommand(1);
  add_inspect_load(*inspect);
  add_inspect_routing(*inspect);
}

}  // namespace concerto
