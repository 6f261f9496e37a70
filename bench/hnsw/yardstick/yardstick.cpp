// hnswlib in one thread, for headgate bench cache --only vectors. It builds an index and says what that took, then
// reads values of ef from its input, and answers each with the CPU time of a query and what was found.
#include <hnswlib/hnswlib.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <malloc.h>
#include <vector>

static double cpu() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) / 1e9;
}

static size_t allocated() {
  struct mallinfo2 m = mallinfo2();
  return m.uordblks + m.hblkhd;
}

static std::vector<float> load(const char *path, size_t n) {
  std::vector<float> v(n);
  FILE *f = fopen(path, "rb");
  if (!f || fread(v.data(), sizeof(float), n, f) != n) {
    fprintf(stderr, "cannot read %s\n", path);
    exit(1);
  }
  fclose(f);
  return v;
}

int main(int argc, char **argv) {
  if (argc != 9) {
    fprintf(stderr, "usage: yardstick BASE N QUERIES Q DIM M EFC K\n");
    return 2;
  }
  size_t n = atol(argv[2]), q = atol(argv[4]), dim = atol(argv[5]), m = atol(argv[6]), efc = atol(argv[7]), k = atol(argv[8]);
  std::vector<float> base = load(argv[1], n * dim), queries = load(argv[3], q * dim);

  size_t before = allocated();
  double began = cpu();
  hnswlib::InnerProductSpace space(dim);
  hnswlib::HierarchicalNSW<float> index(&space, n, m, efc, 100);
  for (size_t i = 0; i < n; i++) index.addPoint(&base[i * dim], i);
  printf("built %.6f %zu\n", cpu() - began, allocated() - before);
  fflush(stdout);

  size_t ef;
  std::vector<uint32_t> found(q * k);
  while (scanf("%zu", &ef) == 1) {
    index.setEf(ef);
    began = cpu();
    for (size_t i = 0; i < q; i++) {
      auto top = index.searchKnn(&queries[i * dim], k);
      for (size_t j = top.size(); j > 0; j--, top.pop()) found[i * k + j - 1] = uint32_t(top.top().second);
    }
    printf("searched %.9f\n", (cpu() - began) / double(q));
    fwrite(found.data(), sizeof(uint32_t), found.size(), stdout);
    fflush(stdout);
  }
}
