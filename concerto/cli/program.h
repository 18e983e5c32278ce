// The program without its process, so that tests can run it.
#pragma once

namespace concerto {

// Runs the command that the arguments name and returns the exit code (docs/errors.md). What goes wrong is said on
// standard error, and with --json also as one object on standard output. Throws nothing.
int run_program(int argc, const char* const* argv);

}  // namespace concerto
