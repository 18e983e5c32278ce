// How long MPI's own reduce-scatter and all-gather of f32 values take: the yardstick of bench/parallel_step.py.
//   mpicc -O2 bench/mpi_sync.c -o mpi_sync && mpirun -n 2 ./mpi_sync ELEMENTS
// Prints the best of seven rounds in seconds.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const long each = (argc > 1 ? atol(argv[1]) : 1000000) / size;
  float* all = malloc(sizeof(float) * (size_t)(each * size));
  float* own = malloc(sizeof(float) * (size_t)each);
  for (long i = 0; i < each * size; ++i) all[i] = (float)(i % 97 + rank);
  double best = 1e9;
  for (int round = 0; round < 7; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Reduce_scatter_block(all, own, (int)each, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allgather(own, (int)each, MPI_FLOAT, all, (int)each, MPI_FLOAT, MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - begin, slowest;
    MPI_Allreduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (slowest < best) best = slowest;
  }
  if (rank == 0) printf("%.6f\n", best);
  free(all);
  free(own);
  MPI_Finalize();
  return 0;
}
