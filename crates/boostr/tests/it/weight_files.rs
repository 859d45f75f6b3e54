//! Writers of small files of weights, valid or not.

/// A safetensors file of any header and data.
pub fn safetensors_file(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// A zip file of stored entries, as plain as can be.
pub fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let sizes = [0, data.len() as u32, data.len() as u32].map(u32::to_le_bytes).concat();
        let name_len = (name.len() as u16).to_le_bytes();
        let offset = (file.len() as u32).to_le_bytes();
        file.extend([b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0", &sizes[..], &name_len, &[0; 2]].concat());
        file.extend([name.as_bytes(), data].concat());
        let fixed = b"PK\x01\x02\x14\0\x14\0\0\0\0\0\0\0\0\0";
        directory
            .extend([fixed, &sizes[..], &name_len, &[0; 12], &offset, name.as_bytes()].concat());
    }
    let count = (entries.len() as u16).to_le_bytes();
    let size = (directory.len() as u32).to_le_bytes();
    let offset = (file.len() as u32).to_le_bytes();
    file.extend(directory);
    file.extend([b"PK\x05\x06\0\0\0\0", &count[..], &count, &size, &offset, &[0; 2]].concat());
    file
}

/// A torch file with this pickle and the storages "0", "1", ...
pub fn torch_zip(pickle: &[u8], storages: &[&[u8]]) -> Vec<u8> {
    let names: Vec<_> = (0..storages.len()).map(|key| format!("m/data/{key}")).collect();
    let mut entries = vec![("m/data.pkl", pickle)];
    entries.extend(names.iter().map(String::as_str).zip(storages.iter().copied()));
    zip(&entries)
}
