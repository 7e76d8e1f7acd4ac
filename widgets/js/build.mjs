// Bundles the front-end into ../rlkit_widgets/static, which is committed.
// `node build.mjs` writes the files; `node build.mjs --check` builds in memory and fails when they differ.

import { build } from "esbuild";
import { readFile, writeFile, mkdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "rlkit_widgets", "static");

const result = await build({
  absWorkingDir: here,
  entryPoints: { dashboard: "src/index.ts" },
  outdir: target,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  banner: { js: "/*! includes uPlot 1.6.32 (MIT), see THIRD_PARTY_LICENSES.txt */" },
  write: false,
  logLevel: "warning",
});

const files = result.outputFiles.map((file) => [file.path, Buffer.from(file.contents)]);
const licence = await readFile(join(here, "node_modules", "uplot", "LICENSE"), "utf8");
files.push([join(target, "THIRD_PARTY_LICENSES.txt"), Buffer.from(`uPlot 1.6.32\n\n${licence.trim()}\n`)]);

if (process.argv.includes("--check")) {
  const stale = [];
  for (const [path, contents] of files) {
    const committed = await readFile(path).catch(() => Buffer.alloc(0));
    if (!committed.equals(contents)) stale.push(path);
  }
  if (stale.length > 0) {
    console.error(`These built files are not what the sources give; run "npm ci && npm run build":\n${stale.join("\n")}`);
    process.exit(1);
  }
  console.log(`The built files match the sources (${files.length} files).`);
} else {
  await mkdir(target, { recursive: true });
  for (const [path, contents] of files) await writeFile(path, contents);
  console.log(files.map(([path, contents]) => `${path}  ${contents.length} bytes`).join("\n"));
}
