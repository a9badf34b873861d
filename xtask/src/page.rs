//! The page of `ringfence report` in a headless browser.

use std::fs;

use crate::install;
use crate::process;
use crate::repo::Repo;

/// The client of the browser, and axe-core, which judges accessibility, with the digests of their
/// files in the Python package index.
const PACKAGES: &str = "\
websocket-client==1.9.2 \
    --hash=sha256:e1a673830a9c7bfa47b1cd3d5e4178f4c9651d80a4eab02c9c23a1c3ec6250ce
axe-playwright-python==0.1.8 \
    --hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8
";

/// Writes two pages and checks them: console, requests, keyboard, filters, contrast, widths, print
/// and pictures.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<String> {
    install::browser(repo)?;
    let target = repo.target_directory()?;
    let tools = target.join("tools/page");
    if !tools.join("axe_playwright_python/axe.min.js").is_file() {
        fs::create_dir_all(&tools)?;
        let requirements = tools.join("requirements.txt");
        fs::write(&requirements, PACKAGES)?;
        process::show(
            process::command(&repo.root, "python3")
                .args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"])
                .args(["--require-hashes", "--disable-pip-version-check"])
                .args(["--retries", "10", "--timeout", "30"])
                .arg("--target")
                .arg(&tools)
                .arg("--requirement")
                .arg(&requirements),
            |_| {},
        )?;
    }
    // With the selection of the tests, nothing is built twice.
    process::show(
        process::command(&repo.root, "cargo")
            .args(["build", "--quiet", "--workspace", "--all-features"])
            .args(["--example", "sample_page"]),
        |_| {},
    )?;
    let pages = target.join("page");
    let example = target.join("debug/examples/sample_page");
    process::show(
        process::command(&repo.root, &example.to_string_lossy()).arg(&pages),
        |_| {},
    )?;
    let mut last = String::new();
    process::show(
        process::command(&repo.root, "python3")
            .arg("tests/page/check.py")
            .arg("--axe")
            .arg(tools.join("axe_playwright_python/axe.min.js"))
            .args(["--assets", "docs/assets", "--keep"])
            .arg(pages.join("pictures"))
            .arg(pages.join("sample.html"))
            .arg(pages.join("hostile.html"))
            .env("PYTHONPATH", &tools)
            .env("PYTHONDONTWRITEBYTECODE", "1"),
        |line| line.clone_into(&mut last),
    )?;
    Ok(last)
}
