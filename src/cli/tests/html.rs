//! `gpupool report --html`: its numbers are those of `--json`, words of a log stay words, and a browser shows it without a complaint.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpupool_config::format_size;
use serde_json::Value;

use crate::common::{golden_folder, gpupool, made, output, stderr, stdout};

/// The most that a page may have.
const PAGE: usize = 5 << 20;

/// A page of these logs, and what `--json` says of them.
fn page_of(logs: &[&Path]) -> (String, Value) {
    let folder = made(tempfile::tempdir());
    let page = folder.path().join("page.html");
    let written = output(gpupool().args(["report", "--html"]).arg(&page).args(logs));
    assert_eq!((written.status.code(), stderr(&written).as_str()), (Some(0), ""));
    let json = stdout(&output(gpupool().args(["report", "--json"]).args(logs)));
    (made(fs::read_to_string(page)), made(serde_json::from_str(&json)))
}

fn golden_logs() -> Vec<PathBuf> {
    ["train.jsonl", "rank0.jsonl", "rank1.jsonl", "rank2.jsonl"].map(|name| golden_folder().join(name)).to_vec()
}

/// A log of these events, each with its fields, a millisecond apart.
fn log_of(folder: &Path, name: &str, pid: u32, events: &[(&str, Value)]) -> PathBuf {
    let line = |(number, (event, fields)): (usize, &(&str, Value))| {
        let mut line = serde_json::json!({
            "v": 1, "t": 1000.0 + number as f64 * 0.001, "pid": pid, "tid": pid, "level": "info", "message": "", "event": event,
        });
        if let (Some(line), Some(fields)) = (line.as_object_mut(), fields.as_object()) {
            line.extend(fields.clone());
        }
        format!("{line}\n")
    };
    let path = folder.join(name);
    made(fs::write(&path, events.iter().enumerate().map(line).collect::<String>()));
    path
}

/// What stands between `before` and `after`, each time that it does.
fn between<'a>(text: &'a str, before: &'a str, after: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before).skip(1).filter_map(move |rest| rest.split(after).next())
}

fn plain(text: &str) -> String {
    let marks = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#x27;", "'"), ("&#x2f;", "/"), ("&amp;", "&")];
    marks.iter().fold(text.to_owned(), |text, (mark, plain)| text.replace(mark, plain))
}

/// The numbers of a page: where each stands in `--json`, its value, and how it is written.
fn numbers(page: &str) -> Vec<(String, String, String)> {
    let number = |text: &str| {
        let (value, rest) = text.split_once("\" data-of=\"")?;
        let (pointer, shown) = rest.split_once("\">")?;
        Some((plain(pointer), value.to_owned(), plain(shown)))
    };
    between(page, "<data value=\"", "</data>").filter_map(number).collect()
}

/// What the page draws.
fn drawn(page: &str) -> Value {
    let data = between(page, "<script id=\"data\" type=\"application/json\">", "</script>").next();
    made(serde_json::from_str(data.unwrap_or_default()))
}

fn assert_numbers_are_those_of(json: &Value, page: &str) -> usize {
    let numbers = numbers(page);
    for (pointer, value, shown) in &numbers {
        let known = json.pointer(pointer).unwrap_or_else(|| panic!("{pointer} is not in --json"));
        assert_eq!(serde_json::from_str(value).ok().as_ref(), Some(known), "{pointer}");
        let as_size = known.as_u64().map(format_size);
        let unit = ["s", "ms", "min", "h", "?"].iter().any(|unit| shown.ends_with(unit));
        assert!(
            as_size.as_ref() == Some(shown) || value == shown || unit || shown.starts_with('-'),
            "{pointer}: {value} is shown as {shown}"
        );
    }
    numbers.len()
}

#[test]
fn the_numbers_of_the_page_are_those_of_the_report() {
    let logs = golden_logs();
    let (page, json) = page_of(&logs.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    assert!(assert_numbers_are_those_of(&json, &page) > 60);
    for pointer in [
        "/processes/3/contexts/1/made/cost",
        "/processes/3/memory/places/gpu3/peak",
        "/processes/3/pinned/sites/0/peak",
    ] {
        assert!(
            page.contains(&format!("data-of=\"{pointer}\""))
                || page.contains(&format!("data-of=\"{}\"", pointer.replace('/', "&#x2f;"))),
            "{pointer}"
        );
    }
    for found in json["findings"].as_array().into_iter().flatten() {
        let fix = found["fix"].as_str().unwrap_or_default();
        assert!(plain(&page).contains(fix), "{fix}");
    }
    // What is drawn is as high as what is told.
    let drawn = drawn(&page);
    let mut lines = 0;
    for process in drawn["processes"].as_array().into_iter().flatten() {
        for line in process["used"].as_array().into_iter().flatten() {
            let runs: Vec<u64> = line["line"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
            let highest = runs.chunks(2).map(|run| run[0]).max();
            let length: u64 = runs.chunks(2).map(|run| run[1]).sum();
            let told = &json["processes"][process["index"].as_u64().unwrap() as usize]["memory"]["places"]
                [line["name"].as_str().unwrap()];
            assert_eq!((highest, Some(length)), (told["peak"].as_u64(), drawn["points"].as_u64()), "{line}");
            lines += 1;
        }
    }
    assert_eq!(lines, 2);
}

/// A process whose words are HTML, of a script, of a template, of a terminal and of a language that runs the other way.
fn hostile(folder: &Path) -> PathBuf {
    let word = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{ 7 * 7 }}&amp;'\"";
    let steering = "\u{1b}[31m\u{202e}moc.elpmaxe\u{0}";
    let site = serde_json::json!({"python": [{"file": word, "line": 3, "function": steering}]});
    let place = "gpu0\"><b>bold</b>";
    log_of(
        folder,
        "<i>hostile&.jsonl",
        7,
        &[
            (
                "process.start",
                serde_json::json!({"version": word, "mode": "m".repeat(300_000), "exe": word, "local_rank": 0, "host": word}),
            ),
            (
                "cuda.init",
                serde_json::json!({"call": word, "thread": steering, "seconds": 0.1, "visible_devices": word, "site": site}),
            ),
            ("memory.site", serde_json::json!({"id": 1, "site": site})),
            ("pool.map", serde_json::json!({"changes": [{"address": 1u64 << 40, "bytes": 64 << 20, "place": place}]})),
            (
                "block.allocate",
                serde_json::json!({"address": 1u64 << 40, "bytes": 48 << 20, "home": 0, "reused": false, "on_peers": 16 << 20, "on_host": 0, "site": 1}),
            ),
            ("block.label", serde_json::json!({"address": 1u64 << 40, "bytes": 48 << 20, "home": 0, "label": word})),
            ("label.level", serde_json::json!({"label": word, "blocks": 1, "bytes": 48 << 20})),
            (
                "pool.level",
                serde_json::json!({"places": [{"place": place, "held": 64 << 20, "used": 48 << 20}, {"place": "p".repeat(200_000), "held": 1, "used": 1}]}),
            ),
            (
                "context.create",
                serde_json::json!({"id": 1, "device": 0, "kind": word, "call": steering, "caller": word, "cost": 5, "seconds": 0.1, "site": site}),
            ),
            (
                "module.load",
                serde_json::json!({"id": 1, "call": word, "kind": word, "path": steering, "seconds": 0.1, "memory": -5, "site": site}),
            ),
            (
                "tier.swap",
                serde_json::json!({"home": 0, "why": word, "bytes_in": 5, "bytes_out": 5, "stayed": 0, "microseconds": 5}),
            ),
            ("pinned.level", serde_json::json!({"pinned": 5, "requested": 5, "registered": 0})),
            (
                "pinned.site",
                serde_json::json!({"allocations": 1, "requested": 5, "pinned": 5, "peak": 5, "live": 0, "seconds": 0.1, "site": site}),
            ),
            ("finding", serde_json::json!({"level": "warn", "code": "GP999", "what": word, "site": site})),
            ("finding", serde_json::json!({"level": "warn", "code": word, "what": steering})),
        ],
    )
}

#[test]
fn words_of_a_log_stay_words() {
    let folder = tempfile::tempdir().unwrap();
    let log = hostile(folder.path());
    let (page, json) = page_of(&[&log]);
    assert_numbers_are_those_of(&json, &page);
    // Ours are the data, uPlot and the script of the page.
    assert_eq!(page.matches("<script").count(), 3);
    assert_eq!(page.matches("</script>").count(), 3);
    for tag in ["<img", "<b>bold", "<i>hostile", "\u{1b}", "\u{202e}", "\u{0}"] {
        assert!(!page.contains(tag), "{tag:?} is in the page");
    }
    assert!(page.contains("&lt;img src=x onerror=") && page.contains("{{ 7 * 7 }}"), "the words themselves are shown");
    assert_eq!(drawn(&page)["names"][0]["peak"], 48 << 20);
    assert!(page.len() < 400_000, "{}", page.len());
}

/// Names of places are shown as well, by every kind of report: nothing in them steers a terminal or turns a page around.
#[test]
fn names_of_a_log_steer_no_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let name = "gpu0\u{1b}[31m\u{9b}31m\u{202e}\u{0}\u{7}";
    let level = serde_json::json!({"places": [{"place": name, "held": 64 << 20, "used": 48 << 20}]});
    let made = (
        "block.allocate",
        serde_json::json!({"address": 1u64 << 40, "bytes": 48 << 20, "home": 0, "reused": false, "on_peers": 0, "on_host": 0}),
    );
    let placed =
        ("block.placed", serde_json::json!({"address": 1u64 << 40, "places": [{"place": name, "bytes": 48 << 20}]}));
    let log = log_of(folder.path(), "log.jsonl", 7, &[made, placed, ("pool.level", level)]);
    let (file, page) = (folder.path().join("file"), folder.path().join("page.html"));
    let steers = |text: &str| text.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}');
    for (options, status) in
        [(&["report"][..], 0), (&["report", "--json"], 0), (&["report", "--oom"], 0), (&["plan"], 2)]
    {
        let said = output(gpupool().args(options).arg(&log));
        assert_eq!(said.status.code(), Some(status), "{options:?}");
        assert!(!steers(&stdout(&said)) && !steers(&stderr(&said)), "{options:?}: {:?}", stdout(&said));
    }
    for (option, file) in [("--html", &page), ("--memory-viz", &file), ("--perfetto", &file), ("--speedscope", &file)] {
        let said = output(gpupool().args(["report", option]).arg(file).arg(&log));
        assert!(said.status.success() && !steers(&stdout(&said)), "{option}: {:?}", stdout(&said));
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(!steers(&page) && page.contains("gpu0\u{fffd}[31m"));
    let json: Value = serde_json::from_str(&stdout(&output(gpupool().args(["report", "--json"]).arg(&log)))).unwrap();
    assert_eq!(json["processes"][0]["memory"]["places"][name]["last"], 48 << 20, "the name itself is whole");
}

#[test]
fn a_page_keeps_to_its_size_whatever_there_is_to_show() {
    let folder = tempfile::tempdir().unwrap();
    let long = |name: &str, number: u64| format!("/{}/{name}{number}.py", "d".repeat(300));
    let mut logs = Vec::new();
    for pid in 1..=12 {
        let mut events =
            vec![("process.start", serde_json::json!({"version": "1", "mode": "pool", "exe": long("exe", pid)}))];
        for number in 0..60 {
            let site = serde_json::json!({"python": (0..12).map(|depth| serde_json::json!({"file": long("f", number * depth), "line": number, "function": "f"})).collect::<Vec<_>>()});
            events.push(("context.create", serde_json::json!({"id": number, "device": 0, "kind": "created", "call": "c", "cost": 5, "seconds": 0.1, "site": site})));
            events.push((
                "finding",
                serde_json::json!({"code": "GP001", "what": long("what", number * 100 + pid), "site": site}),
            ));
            events.push(("memory.site", serde_json::json!({"id": number, "site": site})));
            events.push(("block.allocate", serde_json::json!({"address": (number + 1) << 30, "bytes": (number * 7919 % 997 + 1) << 20, "home": 0, "reused": false, "on_peers": 0, "on_host": 0, "site": number})));
            let places: Vec<Value> = (0..9).map(|place| serde_json::json!({"place": format!("gpu{place}"), "held": number << 20, "used": (number * 7907 % 991) << 20})).collect();
            events.push(("pool.level", serde_json::json!({"places": places})));
            events.push((
                "label.level",
                serde_json::json!({"label": long("label", number), "blocks": 1, "bytes": number << 20}),
            ));
        }
        logs.push(log_of(folder.path(), &format!("{pid}.jsonl"), u32::try_from(pid).unwrap_or(0), &events));
    }
    let (page, json) = page_of(&logs.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    assert!(page.len() < PAGE, "{} bytes", page.len());
    assert!(assert_numbers_are_those_of(&json, &page) > 500);
    assert!(page.contains("<code>gpupool report --json</code> has them"), "what was left out is told");
}

#[test]
fn a_log_is_not_overwritten_and_what_cannot_be_written_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log.jsonl");
    fs::copy(golden_folder().join("train.jsonl"), &log).unwrap();
    let before = fs::read(&log).unwrap();
    let same = output(gpupool().arg("report").arg("--html").arg(&log).arg(&log));
    assert_eq!(same.status.code(), Some(2));
    assert!(stderr(&same).contains("name another file"), "{}", stderr(&same));
    assert_eq!(fs::read(&log).unwrap(), before);
    let nowhere = output(gpupool().arg("report").arg("--html").arg(folder.path().join("no/page.html")).arg(&log));
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(stderr(&nowhere).contains("cannot be written"), "{}", stderr(&nowhere));
    // A log that is cut, one that is none and one that is not there: the page says so, and shows the rest.
    fs::write(&log, &before[..before.len() - 40]).unwrap();
    let foreign = folder.path().join("foreign");
    fs::write(&foreign, "{\"name\": \"trace\"}\n<html>\n").unwrap();
    let page = folder.path().join("page.html");
    let rest =
        output(gpupool().arg("report").arg("--html").arg(&page).args([&log, &foreign, &folder.path().join("none")]));
    assert_eq!(rest.status.code(), Some(2));
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.contains("Not all could be read") && page.contains("stops in the middle") && page.contains("no such file")
    );
    assert!(
        page.contains("data-of=\"/processes/0/contexts/1/made/cost\"") || page.contains("contexts&#x2f;1"),
        "the rest is shown"
    );
}

/// A browser that can be told to say what became of a page.
fn browser() -> Option<PathBuf> {
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable"];
    names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|path| path.is_file())
}

/// What a page is once its scripts have run, and what the browser's console says meanwhile.
fn shown(browser: &Path, page: &Path, profile: &Path) -> (String, Vec<String>) {
    let mut command = Command::new(browser);
    // As root, as in containers, it does not start in its own sandbox; the page is ours.
    command.args([
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--window-size=1280,900",
    ]);
    command.args(["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]);
    let told =
        output(command.arg(format!("--user-data-dir={}", profile.display())).arg(format!("file://{}", page.display())));
    let console = stderr(&told).lines().filter(|line| line.contains(":CONSOLE")).map(str::to_owned).collect();
    (stdout(&told), console)
}

/// What a person does with the page, as a script: each view, zoom, moments, the flame graph, the other colours.
const HANDS: &str = r#"<script>
addEventListener("error", event => { document.body.dataset.complaint = event.message; });
const key = (key, target = document.body) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const choose = (id, value) => { const select = document.getElementById(id); select.value = value; select.dispatchEvent(new Event("change")); };
const frames = () => document.querySelectorAll(".frame").length;
const done = [];
for (const by of [...document.getElementById("by").options].map(option => option.value)) { choose("by", by); done.push(by); }
const plot = document.getElementById("plot");
for (const one of ["+", "+", "ArrowRight", "ArrowLeft", "-", "0"]) key(one, plot);
const before = document.getElementById("held-at").textContent;
for (const one of [",", ",", "."]) key(one);
done.push(document.getElementById("held-at").textContent !== before);
key("p");
done.push(document.getElementById("held-at").textContent === before);
for (const one of document.getElementById("who").options) { choose("who", one.value); done.push(frames() > 0); }
choose("who", "all");
const all = frames();
const last = [...document.querySelectorAll(".frame")].pop();
last.click();
done.push(document.querySelectorAll(".frame.above").length > 0);
key("Escape", document.querySelector(".frame"));
done.push(frames() === all);
key("ArrowDown", document.querySelector(".frame"));
done.push(document.activeElement.className === "frame");
const light = getComputedStyle(document.body).backgroundColor;
key("t");
done.push(getComputedStyle(document.body).backgroundColor !== light);
document.body.dataset.done = done.join(" ");
</script>"#;

#[test]
fn a_browser_shows_it_without_a_complaint() {
    let Some(browser) = browser() else {
        eprintln!("no browser here: chromium or google-chrome would show the page, and nothing of that is checked");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut logs = golden_logs();
    logs.push(hostile(folder.path()));
    let (page, json) = page_of(&logs.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    let path = folder.path().join("page.html");
    fs::write(&path, &page).unwrap();
    let (dom, console) = shown(&browser, &path, &folder.path().join("profile"));
    assert_eq!(console, Vec::<String>::new());
    assert!(dom.contains("data-ready=\"yes\""), "the script has not come to its end: {dom:.2000}");
    assert!(!dom.contains("<title>taken") && dom.matches("<script").count() == 3);
    assert_eq!(assert_numbers_are_those_of(&json, &dom), numbers(&page).len());
    assert!(dom.matches("<canvas").count() >= 3, "plots and a map are drawn");
    assert!(
        dom.contains("class=\"frame\"") && dom.contains("onerror="),
        "the place with the hostile name is in the flame graph"
    );

    // Nobody but the page's own scripts runs under its policy, so hands are lent to a copy without it.
    let policy = between(&page, "http-equiv=\"Content-Security-Policy\" content=\"", "\"").next().unwrap_or_default();
    assert!(policy.contains("default-src &#x27;none&#x27;") || policy.contains("default-src 'none'"), "{policy}");
    fs::write(&path, page.replace(policy, "").replace("</body>", &format!("{HANDS}</body>"))).unwrap();
    let (dom, console) = shown(&browser, &path, &folder.path().join("profile"));
    assert_eq!(console, Vec::<String>::new());
    let done = between(&dom, "data-done=\"", "\"").next().unwrap_or("nothing");
    assert!(done.starts_with("place process") && done.contains("label") && !done.contains("false"), "{done}");
    assert!(!dom.contains("data-complaint="), "{dom:.2000}");
}
