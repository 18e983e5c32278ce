// The program without its process, so that tests can run it.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

// Opens what the caller closed of the standard streams. Else the next file gets the number, and a run's progress is
// written into its metrics.
void hold_standard_streams();

// All commands, as run_program() knows them.
void add_commands(CLI::App& app);

// Runs the command that the arguments name and returns the exit code (docs/errors.md). What goes wrong is said on
// standard error, and with --json also as one object on standard output. Throws nothing.
int run_program(int argc, const char* const* argv);

}  // namespace concerto
