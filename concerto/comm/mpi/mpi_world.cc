#include "concerto/comm/mpi/mpi_world.h"

#include <cstdlib>
#include <exception>
#include <thread>

#include "concerto/comm/mpi/mpi_communicator.h"

namespace concerto {
namespace {

bool has_variable(const char* name) { return std::getenv(name) != nullptr; }

// A rank that Slurm has started beside others and that finds itself alone would be one of many copies of the same run.
void check_slurm(int size) {
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  if (size > 1 || !tasks || std::atoi(tasks) <= 1 || has_variable("OMPI_COMM_WORLD_SIZE")) return;
  throw Error(ErrorCode::kComm, "SLURM_STEP_NUM_TASKS",
              fmt::format("Slurm has started {} ranks, but this one finds itself alone", std::atoi(tasks)),
              "Start them with `srun --mpi=pmix` (or pmi2), or with `concerto launch`.");
}

}  // namespace

struct MpiWorld::State {
  std::shared_ptr<MpiWatch> watch;
  std::unique_ptr<MpiCommunicator> world;

  void make(const MpiOptions& options) {
    watch = std::make_shared<MpiWatch>(options);
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    world = std::make_unique<MpiCommunicator>(watch, comm, "world", 1);
  }
};

MpiWorld::MpiWorld(const MpiOptions& options) : state_(std::make_unique<State>()) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  CHECK(!initialized, "a second world in one process");
  // Open MPI would give the processor away (sched_yield) at every look at a request. Our waits sleep between looks, which
  // under load is a hundred times quicker.
  ::setenv("OMPI_MCA_mpi_yield_when_idle", "0", 1);
  int level = 0, size = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  try {
    if (level < MPI_THREAD_SERIALIZED)
      throw Error(ErrorCode::kUnsupported, "mpi", "this MPI does not allow calls from more than one thread",
                  "Use an MPI built with thread support.");
    check_slurm(size);
    state_->make(options);
  } catch (...) {
    MPI_Finalize();
    throw;
  }
}

MpiWorld::~MpiWorld() {
  const bool aborted = state_->watch->aborted();
  state_->world.reset();
  state_->watch.reset();
  if (!aborted) MPI_Finalize();
}

Communicator& MpiWorld::communicator() { return *state_->world; }

void MpiWorld::rebuild(const MpiOptions& options) {
  state_->world.reset();
  state_->watch.reset();
  state_->make(options);
}

void run_mpi_rank(const std::function<void(Communicator&)>& body, const MpiOptions& options) {
  MpiWorld world(options);
  Communicator& communicator = world.communicator();
  const std::string name = fmt::format("rank {}", communicator.rank());
  try {
    body(communicator);
    communicator.barrier();  // who ends early must still hear of another's failure
  } catch (const PeerError&) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    throw;
  } catch (const Error& e) {
    communicator.abort(e.what());
    throw Error(e.code, e.where.empty() ? name : name + ": " + e.where, e.problem, e.fix);
  } catch (const Bug& e) {
    communicator.abort(e.what());
    throw Bug(name + ": " + e.what());
  } catch (const std::exception& e) {
    communicator.abort(e.what());
    throw;
  }
}

bool mpi_is_built() { return true; }

bool started_by_mpi() {
  return has_variable("OMPI_COMM_WORLD_SIZE") || has_variable("PMIX_RANK") || has_variable("PMI_RANK");
}

}  // namespace concerto
