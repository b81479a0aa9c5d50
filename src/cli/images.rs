//! Folders that settings name for stored memory: whether what is to come back can, and what is to go there.

use std::path::Path;

use gpupool_config::Settings;

/// Why nothing can come back from the folder of `GPUPOOL_RESTORE`. One that is there and has no image yet is none of that: a job that is started again
/// and again has none the first time.
pub fn none_come_back(settings: &Settings) -> Option<String> {
    let folder = settings.restore.as_ref()?;
    let why = match gpupool_store::list(folder) {
        Err(why) => why.to_string(),
        Ok(listed) if listed.is_empty() => instead_of(folder).or_else(|| not_there(settings, folder))?,
        Ok(_) => not_there(settings, folder)?,
    };
    Some(format!("GPUPOOL_RESTORE={}: nothing comes back from there: {why}", folder.display()))
}

/// Why the image that is asked for by its number cannot be had, of a folder that has any.
fn not_there(settings: &Settings, folder: &Path) -> Option<String> {
    let wanted = settings.restore_generation?;
    // Of a job, the job's: its folder has none of one process.
    let jobs = gpupool_store::jobs(folder).unwrap_or_default().into_iter();
    let jobs: Vec<(u64, Option<String>)> =
        jobs.map(|listed| (listed.generation, listed.told.err().map(|error| error.to_string()))).collect();
    let listed = || {
        let listed = gpupool_store::list(folder).unwrap_or_default().into_iter();
        listed.map(|listed| (listed.generation, listed.told.err().map(|error| error.to_string()))).collect()
    };
    let all = if jobs.is_empty() { listed() } else { jobs };
    match all.iter().find(|(number, _)| *number == wanted) {
        Some((_, wrong)) => wrong.clone(),
        None if all.is_empty() => Some(format!("it has no image {wanted}, and no other one")),
        None => {
            let all: Vec<String> = all.iter().map(|(number, _)| number.to_string()).collect();
            Some(format!("it has no image {wanted}, and these: {}", all.join(", ")))
        }
    }
}

/// Which folder was meant by one without images that is an image itself, or that has folders with images. Those of the ranks of a job, which has no image as a whole yet, are none of them,
/// nor what suspended programs have.
fn instead_of(folder: &Path) -> Option<String> {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if let Some(number) = gpupool_store::number_of(&name(folder))
        && let Some(around) = folder.parent()
        && gpupool_store::list(around).is_ok_and(|all| all.iter().any(|listed| listed.generation == number))
    {
        return Some(format!(
            "it is one image; name the folder around it, {}, of which the newest whole image comes back",
            around.display()
        ));
    }
    if gpupool_store::jobs(folder).is_ok_and(|jobs| !jobs.is_empty()) {
        return None;
    }
    let is_meant = |name: &String| !name.starts_with("rank-") && !name.starts_with("suspended-");
    let below = gpupool_store::folders_in(folder).ok()?.into_iter().filter(is_meant);
    let below: Vec<String> = below.map(|name| folder.join(name).display().to_string()).collect();
    match below.as_slice() {
        [] => None,
        [one] => Some(format!("it has no image, and {one} has some: name that")),
        several => Some(format!("it has no image; name one of those in it that have some: {}", several.join(", "))),
    }
}

/// What else is to be said of that folder, though a program is started with it: as long as there is no image, none comes back.
pub fn none_yet(settings: &Settings) -> Option<String> {
    let folder = settings.restore.as_ref()?;
    let has_none = gpupool_store::list(folder).is_ok_and(|listed| listed.is_empty())
        && gpupool_store::jobs(folder).is_ok_and(|jobs| jobs.is_empty())
        && none_come_back(settings).is_none();
    has_none.then(|| format!("GPUPOOL_RESTORE={}: there is no image yet, so nothing comes back", folder.display()))
}

/// Why nothing can go to the folder of `GPUPOOL_IDLE_SUSPEND`.
pub fn none_goes_there(settings: &Settings) -> Option<String> {
    let folder = settings.idle_suspend_to.as_ref()?;
    let why = gpupool_store::may_be_own(folder).err()?;
    let said = settings.said.get("GPUPOOL_IDLE_SUSPEND").map_or("", String::as_str);
    Some(format!("GPUPOOL_IDLE_SUSPEND={said}: no memory can go there: {why}"))
}
