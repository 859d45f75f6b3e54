//! Files of states taken apart, changed, and put together again with a checksum that is right.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// A file's metadata, and its tensors: type, shape, data.
#[derive(Debug, Clone)]
pub struct Sealed {
    pub metadata: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, (String, Vec<usize>, Vec<u8>)>,
}

/// CRC-32 by its definition, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 * (crc & 1)))
    })
}

impl Sealed {
    pub fn read(file: &[u8]) -> Self {
        let len = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + len]).unwrap();
        let data = &file[8 + len..];
        let mut sealed = Self { metadata: BTreeMap::new(), tensors: BTreeMap::new() };
        for (name, value) in header {
            if name == "__metadata__" {
                sealed.metadata = serde_json::from_value(value).unwrap();
                continue;
            }
            let numbers = |value: &Value| -> Vec<usize> {
                value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
            };
            let range = numbers(&value["data_offsets"]);
            let dtype = value["dtype"].as_str().unwrap().to_owned();
            let tensor = (dtype, numbers(&value["shape"]), data[range[0]..range[1]].to_vec());
            sealed.tensors.insert(name, tensor);
        }
        sealed
    }

    /// Sets the checksum.
    pub fn seal(&mut self) {
        let mut all = Vec::new();
        for (key, value) in self.metadata.iter().filter(|(key, _)| *key != "checksum") {
            all.extend(format!("{key}\0{value}\0").into_bytes());
        }
        for (name, (dtype, shape, data)) in &self.tensors {
            let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
            all.extend(format!("{name}\0{dtype}\0{}\0", shape.join(",")).into_bytes());
            all.extend(data);
        }
        self.metadata.insert("checksum".into(), format!("{:08x}", crc32(&all)));
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!(self.metadata));
        let mut data = Vec::new();
        for (name, (dtype, shape, bytes)) in &self.tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            let info = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
            header.insert(name.clone(), info);
            data.extend(bytes);
        }
        let header = serde_json::to_vec(&header).unwrap();
        [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat()
    }
}
